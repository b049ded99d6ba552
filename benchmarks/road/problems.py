"""The problems by name, and what they should reach.

The losses to reach were fixed before the runs, from `pilot`: the demanding one is what the best of
all methods had after 60% of the time, with a seed that takes no part; the modest one lies half way
between the start and that, in logarithms.
"""

from functools import partial

from torch import nn

from benchmarks.road import numbers, physics, pictures, sounds, text
from benchmarks.road.problem import Course, RoadProblem

PROBLEMS: dict[str, RoadProblem] = {
    "curves": RoadProblem("CURVES autoencoder", pictures.curves, batch_size=100),
    "mnist-autoencoder": RoadProblem(
        "MNIST autoencoder", pictures.mnist_autoencoder, batch_size=100
    ),
    "mnist-classifier": RoadProblem("MNIST, MLP", pictures.mnist_classifier, batch_size=100),
    "convolutional": RoadProblem("MNIST, convolutions", pictures.convolutional, batch_size=100),
    "speech": RoadProblem("speech frames", sounds.speech, batch_size=500),
    "gru": RoadProblem("GRU on text", partial(text.reader, nn.GRU), batch_size=50),
    "lstm": RoadProblem("LSTM on text", partial(text.reader, nn.LSTM), batch_size=50),
    "transformer": RoadProblem("transformer on text", text.transformer, batch_size=50),
    "addition": RoadProblem("addition over time", pictures.addition, batch_size=100),
    "memorization": RoadProblem("5-bit memorisation", pictures.memorization),
    "picture": RoadProblem("picture by SIREN", pictures.picture, batch_size=500),
    "regression": RoadProblem("tabular regression", numbers.regression, batch_size=50),
    "classification": RoadProblem("tabular classification", numbers.classification, batch_size=50),
    "logistic": RoadProblem("logistic regression", numbers.logistic, batch_size=500),
    "least-squares": RoadProblem("least squares, condition 1e12", numbers.least_squares),
    "convection": RoadProblem("convection", physics.convection),
    "reaction": RoadProblem("reaction", physics.reaction),
    "wave": RoadProblem("wave", physics.wave),
    "poisson": RoadProblem("Poisson", physics.poisson),
    "deeponet": RoadProblem("DeepONet", physics.deeponet, batch_size=200),
}
# By kind of device; on a CPU a half of the problems. On a GPU the losses come from KSD, Adam and
# L-BFGS alone.
COURSES: dict[str, dict[str, Course]] = {
    "cpu": {
        "mnist-autoencoder": Course(10.0, 304, 98.7),
        "mnist-classifier": Course(4.0, 4.6e-3, 4.8e-6),
        "speech": Course(10.0, 3.7e-2, 4.6e-4),
        "gru": Course(8.0, 2.38, 1.21),
        "picture": Course(6.0, 5.6e-2, 2.7e-3),
        "regression": Course(2.0, 2.0e-2, 3.2e-4),
        "classification": Course(2.0, 2.4e-3, 2.5e-6),
        "logistic": Course(2.0, 0.515, 0.376901),
        "least-squares": Course(1.0, 1.6e-6, 1.6e-12),
        "reaction": Course(12.0, 2.7e-3, 2.4e-6),
        "poisson": Course(12.0, 0.27, 9.3e-4),
    },
    "cuda": {
        "curves": Course(5.0, 240, 62.6),
        "mnist-autoencoder": Course(5.0, 231, 60.2),
        "mnist-classifier": Course(5.0, 1.0e-2, 2.4e-5),
        "convolutional": Course(5.0, 2.4e-2, 2.5e-4),
        "gru": Course(5.0, 2.36, 1.18),
        "lstm": Course(5.0, 2.28, 1.11),
        "transformer": Course(5.0, 2.38, 1.18),
        "addition": Course(5.0, 0.111, 1.25e-2),
        "memorization": Course(5.0, 5.1e-3, 7.6e-6),
        "picture": Course(5.0, 8.2e-2, 6.0e-3),
        "regression": Course(2.0, 1.3e-3, 1.3e-6),
        "classification": Course(2.0, 2.3e-3, 2.3e-6),
        "logistic": Course(2.0, 0.552, 0.438201),
        "least-squares": Course(2.0, 1.6e-6, 1.6e-12),
        "convection": Course(5.0, 1.6, 0.23),
        "reaction": Course(5.0, 3.5e-4, 4.1e-8),
        "wave": Course(5.0, 8.6e-2, 2.1e-2),
        "poisson": Course(5.0, 2.1e-2, 5.1e-6),
        "deeponet": Course(5.0, 2.4e-3, 6.2e-6),
    },
}
