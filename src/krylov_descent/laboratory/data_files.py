"""The data files by name: where they come from, and what they must be."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from krylov_descent.laboratory.speech.rebuilding import noise_clips, spoken_digits

# The site of the MNIST authors no longer serves the files.
MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://raw.githubusercontent.com/fgnt/mnist/master/",
)
# A copy of Weber & Mateas' replays: as it was when it was checked, then as it is.
STARCRAFT_COMMIT = "296ac9b012a99d4de5d29cbf2747f6474776f3ed"
STARCRAFT_MIRRORS = tuple(
    f"https://raw.githubusercontent.com/syhw/OpeningTech/{version}/clustering/"
    for version in (STARCRAFT_COMMIT, "master")
)
# The page of the author of the file.
OLIVETTI = "https://cs.nyu.edu/~roweis/data/olivettifaces.mat"
# Makes the files of one folder, by name, from public ones that it downloads into a scratch folder;
# the flag says whether to show progress.
Rebuild = Callable[[Path, bool], dict[str, bytes]]


@dataclass(frozen=True)
class Source:
    """One data file: `name` is its path below the data folder.

    A file without `mirrors` and `rebuild` can only be put there by hand; one without `sha256`
    cannot be checked.
    """

    name: str
    size: int | None
    sha256: str | None
    mirrors: tuple[str, ...] = ()
    rebuild: Rebuild | None = None


def _mnist(file: str, size: int, sha256: str) -> Source:
    return Source(f"mnist/{file}", size, sha256, tuple(mirror + file for mirror in MNIST_MIRRORS))


def _starcraft(file: str, size: int, sha256: str) -> Source:
    mirrors = tuple(mirror + file for mirror in STARCRAFT_MIRRORS)
    return Source(f"starcraft/{file}", size, sha256, mirrors)


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        _mnist(
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        _mnist(
            "train-labels-idx1-ubyte.gz",
            28_881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        _mnist(
            "t10k-images-idx3-ubyte.gz",
            1_648_877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        _mnist(
            "t10k-labels-idx1-ubyte.gz",
            4_542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
        Source(
            "audiomnist8k/audiomnist8k_r10.delta_i16le.xz",
            24_582_656,
            "3c4faf6d172cd8a60b0688396bc3708bd6f0334f91d89c821325c989ccdcbe99",
            rebuild=spoken_digits,
        ),
        Source(
            "audiomnist8k/audiomnist8k_r10_index.npz",
            17_665,
            "bbca59d74e1f22b1bafd5497c1365150da30a32efdc48f2bd96706e01eb52f87",
            rebuild=spoken_digits,
        ),
        Source(
            "esc50_noise/esc50_noise_8k.npz",
            7_135_540,
            "2fe6a0400e868ca88d1120727993be3cd33355f025fb5183ccdb1b15a7721a7e",
            rebuild=noise_clips,
        ),
        # The original CURVES: no stable address and no published checksum. The generator in
        # problems/curves.py needs no file.
        Source("curves/digs3pts_1.mat", None, None),
        Source(
            "olivetti/olivettifaces.mat",
            1_432_511,
            "b1988d02c72fe5b8ee82b5ef3bb7982eafc74f1e1ff0ae0ade35061ad0af534d",
            (OLIVETTI,),
        ),
        _starcraft(
            "scmPvP_Protoss_Mid.arff",
            123_152,
            "770359ccd415bced3f5ea84f305521458c4edd5b8288949c78c8b7dd69a643b2",
        ),
        _starcraft(
            "scmPvT_Protoss_Mid.arff",
            280_462,
            "bdf906c8c53de49843a971f543c6b3fd1aa4ea949bcbdd34b18c24cb456ab4bd",
        ),
        _starcraft(
            "scmPvT_Terran_Mid.arff",
            256_197,
            "ea34ec50e0a583e5b79751c7675cb457501de0707a9997487ef37e10c42445e3",
        ),
        _starcraft(
            "scmPvZ_Protoss_Mid.arff",
            247_053,
            "392c243e2813b18f9705e393711010979860ff16e0149136c4671f486acf7d22",
        ),
        _starcraft(
            "scmPvZ_Zerg_Mid.arff",
            219_053,
            "7082a6695bbf5cf9105218fbf7c07aaa75b0dbda05cbf659ff0354ac0b7cc7d8",
        ),
        _starcraft(
            "scmTvT_Terran_Mid.arff",
            142_389,
            "23b5865d67003df4730611b7ed1418b42ea914e98c8086bedce2779eff38af51",
        ),
        _starcraft(
            "scmTvZ_Terran_Mid.arff",
            251_739,
            "bf30ae4d5afcd48cd6278f92ba8ef1583dd217b8af7cc64b6469b2df628c0a92",
        ),
        _starcraft(
            "scmTvZ_Zerg_Mid.arff",
            244_707,
            "f7d02317019f2389df4a583ec50c44388b62ea35188e29d008df52ac8eb3fc11",
        ),
        _starcraft(
            "scmZvZ_Zerg_Mid.arff",
            183_613,
            "601bb257da2296ca7a044230c1f067c7e787f86ee91c3d00a45cc3ff935a2a22",
        ),
    )
}
