"""Failures of a run that are told in one sentence."""

import torch

from krylov_descent.laboratory.checkpoint import CheckpointError
from krylov_descent.laboratory.record import RunFolderError
from krylov_descent.laboratory.sources import DataError
from krylov_descent.runtime.ranks import CommunicationError, RankError

EXPECTED = (
    CheckpointError,
    CommunicationError,
    RankError,
    DataError,
    RunFolderError,
    torch.OutOfMemoryError,
)
