"""Text that is tokenized while a run trains on it: the same samples whatever the layout, the place and the past."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import zstandard
from megatron_llama.config.schema import DataConfig
from megatron_llama.data import byte_ranges, readers, text_worker
from megatron_llama.data.byte_ranges import local_file
from megatron_llama.data.loader import BatchLoader, BlendedSamples, Samples
from megatron_llama.data.readers import chunks
from megatron_llama.data.shards import find_shards, shards_of
from megatron_llama.data.stream_places import ENDLESS, StreamedSamples, furthest, places, seek, text_streams
from megatron_llama.data.text_stream import StreamSettings, TextStream
from megatron_llama.data.text_worker import read_documents
from megatron_llama.data.tokenizer.spm import SentencePieceTokenizer
from megatron_llama.data.words import is_stream, is_url
from megatron_llama.errors import DataError
from pyarrow import parquet
from tools.range_server import serving

from tests.refused import refused

SEQ_LENGTH, GLOBAL_BATCH_SIZE = 16, 16


@pytest.fixture(scope="session")
def paragraphs(texts: list[str]) -> list[str]:
    return [part for text in texts for part in text.split("\n\n") if part.strip()]


def lines(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)).encode()


@pytest.fixture(scope="session")
def folder(paragraphs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of every format, the first large enough for several pieces."""
    root = tmp_path_factory.mktemp("text")
    (root / "data").mkdir()
    shares = [paragraphs[:1500], *(paragraphs[1500 + n :: 4] for n in range(4))]
    (root / "data" / "a.jsonl").write_bytes(lines(shares[0]))
    (root / "data" / "b.jsonl.gz").write_bytes(gzip.compress(lines(shares[1])))
    (root / "data" / "c.json.zst").write_bytes(zstandard.compress(lines(shares[2])))
    parquet.write_table(pyarrow.table({"text": shares[3]}), root / "data" / "d.parquet", row_group_size=100)
    (root / "data" / "validation-0.jsonl").write_bytes(lines(shares[4]))
    for name in ("README.md", "dataset_infos.json", ".gitattributes"):
        (root / name).write_text("{}")
    return root


@pytest.fixture(scope="session")
def settings(tokenizer: SentencePieceTokenizer) -> StreamSettings:
    assert tokenizer.eos_id is not None
    return StreamSettings(
        tokenizer=str(tokenizer.path), tokenizer_type=None, key="text", end=tokenizer.eos_id, vocab_size=tokenizer.vocab_size,
        seq_length=SEQ_LENGTH, seed=7, shuffled=True, lanes=8, window=64, workers=2, step_samples=GLOBAL_BATCH_SIZE, identity="t",
    )  # fmt: skip


def open_stream(word: str | Path, settings: StreamSettings, *, validation: bool = False, samples: int = ENDLESS) -> StreamedSamples:
    with ThreadPoolExecutor(4) as pool:
        shards = shards_of(find_shards(str(word), pool), validation=validation)
    return StreamedSamples(TextStream(str(word), shards, settings, samples=samples), DataConfig(), None)


def loader(samples: Samples, rank: int, size: int, micro: int) -> BatchLoader:
    return BatchLoader(
        samples, shuffled=False, micro_batch_size=micro, global_batch_size=GLOBAL_BATCH_SIZE, seed=7, dp_rank=rank, dp_size=size
    )


def rows_of(found: BatchLoader, consumed: int) -> list[list[int]]:
    batches = found.microbatches(consumed)
    assert all((batch.tokens[1:] == batch.labels[:-1]).all() for batch in batches)
    return [row for batch in batches for row in np.concatenate((batch.tokens.numpy()[:1], batch.labels.numpy())).T.tolist()]


def steps(samples: Sequence[Samples], micro: int, first: int, last: int) -> list[list[list[int]]]:
    """The samples of steps [first, last), in the order of their positions, as ranks with ``samples`` read them."""
    size = len(samples)
    loaders = [loader(each, rank, size, micro) for rank, each in enumerate(samples)]
    found = []
    for step in range(first, last):
        ranks = [rows_of(each, step * GLOBAL_BATCH_SIZE) for each in loaders]
        blocks = len(ranks[0]) // micro
        found.append([row for m in range(blocks) for rank in ranks for row in rank[m * micro : (m + 1) * micro]])
    return found


@pytest.fixture(scope="session")
def expected(folder: Path, settings: StreamSettings) -> list[list[list[int]]]:
    """40 steps as one rank reads them."""
    return steps([open_stream(folder, settings)], 2, 0, 40)


def test_a_pass_has_every_token_of_every_training_file_once(
    folder: Path, settings: StreamSettings, tokenizer: SentencePieceTokenizer
) -> None:
    """In file order with one lane: the samples laid end to end are the documents, each with its end token, and begin again."""
    one = replace(settings, lanes=1, window=16, shuffled=False)
    stream = open_stream(folder, one).text
    whole: list[int] = []
    wanted = [id for file in ("a", "b", "c", "d") for id in documents_of(folder, file, tokenizer, one.end)]
    assert len(wanted) > 20000
    for index in range(len(wanted) // SEQ_LENGTH + 2):
        whole += stream.sample(index)[:-1].tolist()
    assert whole[: len(wanted)] == wanted
    assert whole[len(wanted) :] == wanted[: len(whole) - len(wanted)], "the next pass"


def documents_of(folder: Path, file: str, tokenizer: SentencePieceTokenizer, end: int) -> Iterator[int]:
    [path] = (folder / "data").glob(f"{file}.*")
    if path.suffix == ".parquet":
        texts = parquet.read_table(path)["text"].to_pylist()
    else:
        opened = {".gz": gzip.decompress, ".zst": zstandard.decompress}.get(path.suffix, bytes)(path.read_bytes())
        texts = [json.loads(line)["text"] for line in opened.splitlines()]
    for text in texts:
        yield from (*tokenizer.encode(text), end)


def test_shuffled_lanes_hold_the_same_tokens(
    folder: Path, settings: StreamSettings, tokenizer: SentencePieceTokenizer, expected: list[list[list[int]]]
) -> None:
    """What a lane reads is the text of its pieces: no token is lost or invented between pieces, blocks and answers."""
    stream = open_stream(folder, replace(settings, window=settings.lanes)).text
    shuffled = open_stream(folder, settings).text
    of_block = settings.window // stream.lanes
    for lane in range(stream.lanes):
        plain = [tuple(stream.sample(lane + stream.lanes * k).tolist()) for k in range(4 * of_block)]
        assert all(before[-1] == after[0] for before, after in pairwise(plain)), "neighbours share a token"
        mixed = [tuple(shuffled.sample(lane + stream.lanes * k).tolist()) for k in range(4 * of_block)]
        assert plain != mixed
        for block in range(4):
            part = slice(block * of_block, (block + 1) * of_block)
            assert sorted(plain[part]) == sorted(mixed[part])
    assert [row for step in expected[:1] for row in step] == [shuffled.sample(n).tolist() for n in range(GLOBAL_BATCH_SIZE)]


@pytest.mark.long
@pytest.mark.tries("stream_workers")
@pytest.mark.parametrize(("size", "micro", "workers"), [(2, 1, 2), (4, 2, 1), pytest.param(8, 2, 1, marks=pytest.mark.long)])
def test_every_layout_reads_the_same_samples(
    size: int, micro: int, workers: int, folder: Path, settings: StreamSettings, expected: list[list[list[int]]]
) -> None:
    ranks = [open_stream(folder, replace(settings, workers=workers)) for _ in range(size)]
    assert steps(ranks, micro, 0, 12) == expected[:12]
    read = [sorted(rank.text._open) for rank in ranks]
    if settings.lanes % (size * micro) == 0:
        assert sorted(lane for lanes in read for lane in lanes) == list(range(8)), "no two ranks read the same lane"


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after", "at"),
    [(2, 1, 16), (1, 4, 23), *(pytest.param(*each, marks=pytest.mark.long) for each in ((1, 1, 5), (4, 2, 30), (2, 8, 3)))],
)
def test_a_resumed_run_reads_the_same_samples_in_any_layout(
    before: int, after: int, at: int, folder: Path, settings: StreamSettings, expected: list[list[list[int]]]
) -> None:
    ranks: list[Samples] = [open_stream(folder, settings) for _ in range(before)]
    assert steps(ranks, 1, 0, at + 1) == expected[: at + 1]  # one step is read ahead of the checkpoint
    kept = json.loads(json.dumps(furthest([places(each, at * GLOBAL_BATCH_SIZE) for each in ranks])))
    [rows] = kept
    assert len(rows) == 8 and all(len(row) == 4 for row in rows)
    others = [open_stream(folder, settings) for _ in range(after)]
    for each in others:
        seek(each, kept)
    assert steps(others, 1, at, at + 6) == expected[at : at + 6]
    again = furthest([places(each, at * GLOBAL_BATCH_SIZE) for each in others])
    assert json.loads(json.dumps(again)) == kept, "the same place is kept whatever was read since"


def test_no_more_is_read_than_the_place_says(folder: Path, settings: StreamSettings) -> None:
    """A resumed lane begins at its document, not at the beginning of its piece."""
    with serving(folder) as server:
        first = open_stream(server.url + "/data/a.jsonl", replace(settings, lanes=1))
        steps([first], 1, 0, 60)
        kept = places(first, 60 * GLOBAL_BATCH_SIZE)
        [[[_, piece, place, _]]] = kept
        assert piece > 0 or place > 20000
        resumed = open_stream(server.url + "/data/a.jsonl", replace(settings, lanes=1))
        seek(resumed, kept)
        server.sent = 0
        steps([resumed], 1, 60, 61)
        resumed.text._helpers[0].close()
        # The server counts what it has sent afterwards: perhaps the byte with which the size was asked, too.
        assert server.sent <= 2 * byte_ranges.READ_BYTES + 1


def test_a_run_that_goes_back_reads_the_same_again(folder: Path, settings: StreamSettings, expected: list[list[list[int]]]) -> None:
    """A rollback, and an evaluation that begins again, without a place to go to."""
    stream = open_stream(folder, settings)
    assert steps([stream], 1, 0, 30) == expected[:30]
    assert steps([stream], 1, 0, 3) == expected[:3]
    assert steps([stream], 1, 17, 20) == expected[17:20], "samples that are left out"


@pytest.mark.tries("stream_window")
def test_what_a_rank_holds_is_bounded(folder: Path, settings: StreamSettings) -> None:
    stream = open_stream(folder, settings)
    most = 0
    for step in range(0, 200, 10):
        steps([stream], 1, step, step + 10)
        most = max(most, sum(len(lane.tokens) for lane in stream.text._open.values()))
        assert all(len(lane.starts) <= 4 and len(lane.documents) < 300 for lane in stream.text._open.values())
    window = settings.window * SEQ_LENGTH
    assert window < most < 2 * window + 8 * 64 * 120, "two windows, and the documents that are tokenized together"


@pytest.mark.long
def test_blends_take_from_each_what_its_weight_says(folder: Path, settings: StreamSettings) -> None:
    def blend() -> Samples:
        parts = [open_stream(folder / "data" / name, replace(settings, seed=n)) for n, name in enumerate(("a.jsonl", "d.parquet"))]
        return BlendedSamples(parts, (3, 1))

    whole, halves = blend(), [blend(), blend()]
    expected = steps([whole], 1, 0, 12)
    assert steps(halves, 1, 0, 12) == expected
    alone = open_stream(folder / "data" / "d.parquet", replace(settings, seed=1)).text
    taken = [row for step in expected for row in step]
    assert [row in taken for row in (alone.sample(n).tolist() for n in range(60))] == [True] * 48 + [False] * 12
    kept = furthest([places(each, 7 * GLOBAL_BATCH_SIZE) for each in halves])
    resumed = blend()
    seek(resumed, kept)
    assert steps([resumed], 1, 7, 12) == expected[7:]
    assert len(text_streams(resumed)) == 2


def test_validation_is_read_once_and_the_same_each_time(folder: Path, settings: StreamSettings) -> None:
    plain = replace(settings, shuffled=False, window=0, workers=1)
    stream = open_stream(folder, plain, validation=True, samples=64)
    assert len(stream) == 64 and stream.text.num_files == 1
    assert steps([stream], 1, 0, 4) == steps([stream], 1, 0, 4)
    long = open_stream(folder, plain, validation=True, samples=GLOBAL_BATCH_SIZE * 10000)
    with pytest.raises(DataError, match=r"fewer samples than --eval-iters 10000 x --global-batch-size 16.*lower --eval-iters"):
        steps([long], 1, 0, 10000)


def test_a_folder_of_http_is_named() -> None:
    """Nobody is asked what folders there are."""
    with ThreadPoolExecutor(1) as pool, pytest.raises(DataError) as raised:
        list(byte_ranges.remote_files("https://host/*/a.jsonl", pool))
    assert refused(raised.value).key == "data.byte_ranges._http_files"


def test_http_gives_the_same_samples_and_survives_failures(folder: Path, settings: StreamSettings, expected: list[list[list[int]]]) -> None:
    with serving(folder, latency=0.002) as server:
        remote = open_stream(server.url, settings)
        assert remote.identity() == open_stream(folder, settings).identity()
        server.failing = 3
        assert steps([remote], 1, 0, 12) == expected[:12]
        assert server.failing == 0
        assert [shard.name for shard in found(server.url + "/data/*.jsonl")] == ["a.jsonl", "validation-0.jsonl"]


def found(word: str | Path) -> list:
    with ThreadPoolExecutor(2) as pool:
        return find_shards(str(word), pool)


def test_an_object_store_gives_the_same_samples(folder: Path, settings: StreamSettings, expected: list[list[list[int]]]) -> None:
    """``file://`` goes the way of every store of fsspec."""
    remote = open_stream(f"file://{folder}", settings)
    assert is_url(found(f"file://{folder}")[0].file.path)
    assert remote.identity() == open_stream(folder, settings).identity()
    assert steps([remote], 1, 0, 8) == expected[:8]
    assert [shard.name for shard in found(f"file://{folder}/data/*.jsonl")] == ["a.jsonl", "validation-0.jsonl"]
    assert [shard.name for shard in found(f"file://{folder}/data/a.jsonl")] == ["a.jsonl"]


def test_which_words_name_text(folder: Path, tmp_path: Path) -> None:
    text = [folder, folder / "data/a.jsonl", folder / "data/*.gz", "s3://bucket/corpus/", "https://host/a.jsonl"]
    assert all(is_stream(str(word)) for word in text)
    (tmp_path / "docs.idx").touch()
    (tmp_path / "docs").mkdir()
    assert not is_stream(str(tmp_path / "docs")) and not is_stream("nothing/there")
    assert [shard.name for shard in found(folder)] == [
        "data/a.jsonl", "data/b.jsonl.gz", "data/c.json.zst", "data/d.parquet", "data/validation-0.jsonl",
    ]  # fmt: skip
    assert [shard.name for shard in found(folder / "data/*.jsonl")] == ["a.jsonl", "validation-0.jsonl"]
    (tmp_path / "docs" / "data.arrow").write_text("x")
    with pytest.raises(DataError, match=r"got data.arrow, expected files .jsonl.*write a folder of datasets.save_to_disk as parquet"):
        found(tmp_path / "docs")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="got no file of text"):
        found(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", lines(["one"] * 3000) + b'{"text": 1}\n', r"a\.jsonl:3001: field 'text': got number 1, expected a string"),
        ("a.jsonl", lines(["one"] * 3000) + b"{]\n" + lines(["two"] * 9), r"a\.jsonl:3001: got invalid JSON"),
        ("a.jsonl.gz", gzip.compress(lines(["one"] * 500) + b'{"body": "x"}\n'), r"a\.jsonl\.gz:501: field 'text': got no such field"),
        ("a.jsonl.gz", gzip.compress(lines(["one"] * 500))[:-9], r"a\.jsonl\.gz: got .*expected a readable file; restore"),
        ("a.jsonl", lines(["one"] * 40).replace(b"one", b"\xff"), r"a\.jsonl:1: got byte 0xff at byte"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_line(
    name: str, content: bytes, message: str, settings: StreamSettings, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    stream = open_stream(tmp_path, replace(settings, lanes=2, shuffled=False))
    with pytest.raises(DataError, match=message):
        steps([stream], 1, 0, 100)


@pytest.mark.few(4)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("shuffled", "with_text", "refused"),
    [
        (True, "", True),
        (True, "c", False),
        (False, "", True),
        (False, "ae", True),  # these come back to the first lane alone, and the others read for ever
        (False, "abcd", False),
    ],
)
def test_text_that_never_comes(shuffled: bool, with_text: str, refused: bool, rank: int, settings: StreamSettings, tmp_path: Path) -> None:
    """It is an error on each rank that would wait for it, which has half of the lanes."""
    for name in "abcdefgh":
        (tmp_path / f"{name}.jsonl").write_bytes(lines(["one two three" * (name in with_text)] * 90))
    reading = loader(open_stream(tmp_path, replace(settings, lanes=4, shuffled=shuffled)), rank, 2, 1)
    if refused:
        with pytest.raises(DataError, match=r"--data-path .*: got documents without text alone \(.*\), expected text; change"):
            reading.microbatches(0)
    else:
        assert len(reading.microbatches(0)) == GLOBAL_BATCH_SIZE // 2


@pytest.mark.tries("stream_key")
def test_columns_are_named(settings: StreamSettings, tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"body": ["a", None]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet: column 'text': got no such column \(columns: 'body'\).*change --stream-key"):
        steps([open_stream(tmp_path, settings)], 1, 0, 1)
    with pytest.raises(DataError, match=r"a.parquet: row 2, column 'body': got null"):
        steps([open_stream(tmp_path, replace(settings, key="body"))], 1, 0, 1)


def test_a_server_that_cannot_be_used(folder: Path, settings: StreamSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(byte_ranges, "FIRST_PAUSE", 0.001)
    with serving(folder, ranges=False) as server, pytest.raises(DataError, match="the server sends whole files only"):
        found(server.url)
    with serving(folder) as server:
        with pytest.raises(DataError, match=r"nothing\.jsonl: got HTTP status 404.*expected a server that answers"):
            found(server.url + "/nothing.jsonl")
        # It may have been meant as the prefix of an indexed dataset.
        with pytest.raises(DataError, match=r"/nothing/: got no such page \(HTTP status 404.*to which \.idx and \.bin can be added; check"):
            found(server.url + "/nothing")
        server.failing = 1000
        with pytest.raises(DataError, match=r"got HTTP status 503.*after 8 tries"):
            found(server.url + "/data/a.jsonl")
        gone = server.url
    with pytest.raises(DataError, match=r"Connection refused.* after 8 tries"):
        found(gone)
    with pytest.raises(DataError, match=r"expected packages that read such a URL; pip install '\.\[fsspec\]'"):
        found("s3://bucket/corpus")
    (tmp_path / "a.jsonl").write_bytes(lines(["one two three"] * 100))
    with serving(tmp_path) as server:
        [shard] = found(server.url + "/a.jsonl")
        (tmp_path / "a.jsonl").write_bytes(lines(["one two three"] * 90))
        with pytest.raises(DataError, match=r"a file of \d+ bytes instead of \d+, expected the file as it was"):
            byte_ranges.read_range(shard.file, 0, 10)


def test_ids_that_the_model_does_not_have(folder: Path, settings: StreamSettings) -> None:
    with pytest.raises(DataError, match=r"data/.*: the document at \d+: got id \d+, expected 0 to 299; take this model's tokenizer"):
        steps([open_stream(folder, replace(settings, vocab_size=300))], 1, 0, 3)


def test_a_worker_that_dies_is_an_error(folder: Path, settings: StreamSettings) -> None:
    stream = open_stream(folder, settings)
    steps([stream], 1, 0, 1)
    for helper in stream.text._helpers:
        os.kill(helper.pid, 9)
    with pytest.raises(DataError, match="the process that reads and tokenizes text: got exit status -9"):
        steps([stream], 1, 1, 400)


@pytest.mark.tries("stream_lanes")
def test_the_identity_tells_streams_apart(folder: Path, settings: StreamSettings) -> None:
    this = open_stream(folder, settings).identity()
    assert this == open_stream(folder, replace(settings, workers=1, step_samples=4)).identity(), "these change no sample"
    changes = (
        {"seed": 8}, {"key": "id"}, {"lanes": 4}, {"window": 8}, {"seq_length": 8}, {"shuffled": False}, {"identity": "u"}, {"end": 3},
    )  # fmt: skip
    others = [open_stream(folder, replace(settings, **change)).identity() for change in changes]
    assert this not in others and len({json.dumps(each) for each in others}) == len(changes)
    assert re.fullmatch("[0-9a-f]{32}", str(this["stream"]))


@pytest.mark.parametrize(
    "row", [7, None, "abcd", [0, 0, 0], [0, 0, 0, -1], [0, 1.0, 0, 0], [True, 0, 0, 0], [0, 0, 1 << 64, 0], [1 << 60, 0, 0, 0]]
)
def test_places_of_another_kind_are_refused(row: object, folder: Path, settings: StreamSettings) -> None:
    samples = open_stream(folder, settings)
    kept = json.loads(json.dumps(places(samples, 0)))
    seek(samples, kept)
    kept[0][1] = row
    with pytest.raises(DataError, match=r"stream_places of the checkpoint: stream 0, lane 1: got .*, expected four integers"):
        seek(samples, kept)


def test_a_row_that_is_no_text_is_one_error(tmp_path: Path) -> None:
    """parquet does not look whether its texts are UTF-8."""
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"text": ["aaaa", "bbbb"]}), path, compression="none", use_dictionary=False, write_statistics=False)
    path.write_bytes(path.read_bytes().replace(b"bbbb", b"b\xffbb"))
    with pytest.raises(DataError, match=r"x\.parquet: got .*, expected a readable file"):
        list(read_documents(local_file(path), 0, path.stat().st_size, 0, "text"))
    (chunk,) = chunks([path], ["text"])
    assert chunk.problem is not None and "expected a readable file" in chunk.problem


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".txt.gz"])
def test_a_line_longer_than_any_is_one_error(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (readers, text_worker):
        monkeypatch.setattr(module, "LARGEST_RECORD", 5000)
    path = tmp_path / f"x{suffix}"
    content = b'{"text": "' + b"a" * 6000 + b'"}\n'
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    *_, chunk = chunks([path], ["text"])
    words = "a line or a text of more than 5,000 bytes, expected at most 5,000 bytes; split it into several documents, as JSON lines"
    assert chunk.problem is not None and words in chunk.problem
    if suffix != ".txt.gz":
        with pytest.raises(DataError, match=words):
            list(read_documents(local_file(path), 0, path.stat().st_size, 0, "text"))
