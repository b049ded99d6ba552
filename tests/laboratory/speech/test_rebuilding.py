"""The archives made from WAV files that a server on this machine hands out."""

import hashlib
import io
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import scipy.io.wavfile

from krylov_descent.laboratory.data_files import SOURCES, Source
from krylov_descent.laboratory.download import DataError
from krylov_descent.laboratory.sources import fetch, inventory, locate
from krylov_descent.laboratory.speech.archives import decode_differences, read_arrays
from krylov_descent.laboratory.speech.rebuilding import (
    noise_clips,
    packed_differences,
    read_wav,
    spoken_digits,
)

SPEAKERS = (1, 12)
DIGITS_XZ = "audiomnist8k/audiomnist8k_r10.delta_i16le.xz"
DIGITS_INDEX = "audiomnist8k/audiomnist8k_r10_index.npz"


class Quiet(SimpleHTTPRequestHandler):
    served: list[str]

    def do_GET(self) -> None:
        self.served.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test output quiet."""


@pytest.fixture
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder, and the address under which its files can be had."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "public"
    folder.mkdir()
    Quiet.served = []
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def tone(frequency: float, rate: int, seconds: float) -> npt.NDArray[np.float64]:
    return 0.3 * np.sin(2 * np.pi * frequency * np.arange(int(rate * seconds)) / rate)


def write_wav(path: Path, rate: int, signal: npt.NDArray[np.float64]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.wavfile.write(path, rate, np.round(signal * 32767).astype(np.int16))


def publish_digits(folder: Path) -> None:
    """One repetition; the tone tells speaker and digit, the length the digit."""
    for speaker in SPEAKERS:
        for digit in range(10):
            name = f"{speaker:02d}/{digit}_{speaker:02d}_0.wav"
            write_wav(folder / name, 48_000, tone(200 + 20 * digit, 48_000, 0.1 + digit / 100))


def digits_registry(address: str, checksums: dict[str, str]) -> dict[str, Source]:
    rebuild = partial(spoken_digits, address=address, speakers=SPEAKERS, repetitions=1)
    return {
        name: Source(name, None, checksums.get(name), rebuild=rebuild)
        for name in (DIGITS_XZ, DIGITS_INDEX)
    }


def test_recordings_are_resampled_and_packed_in_order(
    tmp_path: Path, public: tuple[Path, str]
) -> None:
    folder, address = public
    publish_digits(folder)
    data = tmp_path / "data"
    fetch(["audiomnist8k"], data, progress=False, sources=digits_registry(address, {}))
    assert len(Quiet.served) == 20  # each once, for both files
    assert sorted(path.name for path in (data / "audiomnist8k").iterdir()) == sorted(
        name.split("/")[1] for name in (DIGITS_XZ, DIGITS_INDEX)
    )
    index = read_arrays(data / DIGITS_INDEX, "offset", "digit", "speaker", "rep")
    assert index["speaker"].tolist() == [1] * 10 + [12] * 10
    assert index["digit"].tolist() == [*range(10), *range(10)]
    assert index["digit"].dtype == np.uint8
    assert np.diff(index["offset"]).tolist() == [800 + 80 * digit for digit in range(10)] * 2
    pcm = decode_differences(data / DIGITS_XZ)
    for recording in range(20):
        start, end = index["offset"][recording : recording + 2]
        digit = recording % 10
        expected = 32768 * tone(200 + 20 * digit, 8_000, 0.1 + digit / 100)
        # The filter needs a little room at both ends.
        np.testing.assert_allclose(pcm[start + 40 : end - 40], expected[40:-40], atol=30)


def test_both_files_are_checked(tmp_path: Path, public: tuple[Path, str]) -> None:
    folder, address = public
    publish_digits(folder)
    made = spoken_digits(
        tmp_path / "first", False, address=address, speakers=SPEAKERS, repetitions=1
    )
    right = {
        f"audiomnist8k/{name}": hashlib.sha256(content).hexdigest()
        for name, content in made.items()
    }
    data = tmp_path / "data"
    wrong = right | {DIGITS_INDEX: "0" * 64}
    with pytest.raises(DataError, match=r"r10_index.npz cannot be rebuilt.*should be 000000000000"):
        locate(DIGITS_INDEX, data, progress=False, sources=digits_registry(address, wrong))
    assert (data / "audiomnist8k" / "originals" / "12" / "9_12_0.wav").is_file()
    before = len(Quiet.served)
    sources = digits_registry(address, right)
    path = locate(DIGITS_INDEX, data, progress=False, sources=sources)
    assert path.read_bytes() == made["audiomnist8k_r10_index.npz"]
    assert len(Quiet.served) == before  # the recordings were still there
    assert [status.ok for status in inventory(data, verify=True, sources=sources)] == [True, True]
    assert not (data / "audiomnist8k" / "originals").exists()


def test_clips_are_resampled_to_one_level(tmp_path: Path, public: tuple[Path, str]) -> None:
    folder, address = public
    loud, quiet = 3 * tone(200, 44_100, 0.5), tone(200, 44_100, 0.5) / 20
    peaked = np.zeros(22_050)
    peaked[1_000:1_200] = 0.9
    for name, signal in (("a.wav", loud), ("b.wav", quiet), ("c.wav", peaked)):
        write_wav(folder / name, 44_100, signal)
    clips = [("train", "a.wav"), ("rain", "b.wav"), ("wind", "c.wav")]
    (content,) = noise_clips(tmp_path / "scratch", False, address=address, clips=clips).values()
    with np.load(io.BytesIO(content)) as archive:
        pcm, category = archive["pcm"].reshape(3, -1) / 32767, archive["category"].tolist()
        assert archive["offset"].tolist() == [0, 4_000, 8_000, 12_000]
        assert archive["filename"].tolist() == ["a.wav", "b.wav", "c.wav"]
    assert category == ["train", "rain", "wind"]
    np.testing.assert_allclose(np.sqrt((pcm[:2] ** 2).mean(1)), 0.1, rtol=1e-3)
    np.testing.assert_allclose(pcm[0], pcm[1], atol=1e-2)
    # A level of 0.1 would need a peak above 1.
    assert np.abs(pcm[2]).max() == pytest.approx(0.99, abs=1e-4)


def test_a_missing_recording_is_named(tmp_path: Path, public: tuple[Path, str]) -> None:
    folder, address = public
    publish_digits(folder)
    (folder / "12" / "7_12_0.wav").unlink()
    with pytest.raises(DataError, match=r"12/7_12_0.wav \(HTTP 404.*by hand"):
        spoken_digits(tmp_path, False, address=address, speakers=SPEAKERS, repetitions=1)
    assert Quiet.served.count("/12/7_12_0.wav") == 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:2_000], "cannot be read as a WAV file.*prematurely"),
        (lambda content: b"no sound at all", "cannot be read as a WAV file"),
        (lambda content: content[:44] + bytes(len(content) - 44), "not silent"),
    ],
)
def test_a_damaged_recording_is_named(
    tmp_path: Path,
    public: tuple[Path, str],
    damage: Callable[[bytes], bytes],
    message: str,
) -> None:
    folder, address = public
    publish_digits(folder)
    path = folder / "01" / "3_01_0.wav"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        spoken_digits(tmp_path / "data", False, address=address, speakers=SPEAKERS, repetitions=1)
    assert str(tmp_path / "data" / "01" / "3_01_0.wav") in str(caught.value)


def test_another_sampling_rate_is_refused(tmp_path: Path, public: tuple[Path, str]) -> None:
    folder, address = public
    publish_digits(folder)
    write_wav(folder / "12" / "5_12_0.wav", 16_000, tone(200, 16_000, 0.2))
    with pytest.raises(DataError, match=r"12/5_12_0.wav has 16,000 samples a second.*48,000"):
        spoken_digits(tmp_path / "data", False, address=address, speakers=SPEAKERS, repetitions=1)


def test_two_channels_are_refused(tmp_path: Path) -> None:
    scipy.io.wavfile.write(tmp_path / "a.wav", 48_000, np.ones((100, 2), np.int16))
    with pytest.raises(DataError, match=r"a.wav should be a mono.*\(100, 2\)"):
        read_wav(tmp_path / "a.wav", 48_000)


def test_differences_that_overflow_come_back(tmp_path: Path) -> None:
    pcm = np.array([0, 32767, -32768, 5, -5], np.int16)
    (tmp_path / "a.xz").write_bytes(packed_differences(pcm))
    np.testing.assert_array_equal(decode_differences(tmp_path / "a.xz"), pcm)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"neither")
    with pytest.raises(DataError, match="a cannot be read as xz"):
        decode_differences(tmp_path / "a")
    with pytest.raises(DataError, match="a cannot be read as arrays offset"):
        read_arrays(tmp_path / "a", "offset")


def test_the_registry_rebuilds_the_archives_and_knows_their_checksums() -> None:
    for name in (DIGITS_XZ, DIGITS_INDEX, "esc50_noise/esc50_noise_8k.npz"):
        source = SOURCES[name]
        assert source.rebuild is not None
        assert source.sha256 is not None
        assert len(bytes.fromhex(source.sha256)) == 32
