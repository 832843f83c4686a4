"""Retrieval: BM25, dense, hybrid, a real /retrieve server, indexes on disk, and custom data end to end."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from servers_for_tests import server_in_thread
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from agentgym_rl.cli import app
from agentgym_rl.environment import catalog
from agentgym_rl.environment.envs.searchqa import Passage, SearchQA, build_index, open_retriever, searchqa_from
from agentgym_rl.environment.envs.searchqa.datasets import load_with_rows
from agentgym_rl.environment.envs.searchqa.dense import DenseRetriever, Encoder, EncoderSettings, nearest
from agentgym_rl.environment.envs.searchqa.passages import MappedPassages, read_corpus
from agentgym_rl.environment.envs.searchqa.remote import RemoteRetriever
from agentgym_rl.environment.envs.searchqa.retrieval import BM25Retriever, HybridRetriever, fuse
from agentgym_rl.environment.pool import LocalPool, RemotePool
from agentgym_rl.errors import ConfigError, EnvError, EnvTimeout, EnvUnavailable

TEXTS = {
    "Ada Lovelace": "Ada Lovelace wrote the first program for the Analytical Engine of Charles Babbage.",
    "Charles Babbage": "Charles Babbage was an English mathematician who designed the Analytical Engine.",
    "Grace Hopper": "Grace Hopper wrote an early compiler and popularised the word debugging.",
    "Zürich": "Zürich is the largest city of Switzerland and lies on a lake.",
    "Lake": "A lake is a body of water surrounded by land.",
    "Compiler": "A compiler translates programs from one language into another.",
}
PASSAGES = [Passage(str(number), title, text) for number, (title, text) in enumerate(TEXTS.items())]


def titles(hits: list[list[Passage]]) -> list[list[str]]:
    return [[passage.title for passage in passages] for passages in hits]


def write_corpus(path: Path, style: str) -> Path:
    if style == "wiki":
        rows: list[dict[str, Any]] = [{"id": p.id, "contents": f'"{p.title}"\n{p.text}'} for p in PASSAGES]
    else:
        rows = [{"title": p.title, "text": p.text} for p in PASSAGES]
    text = json.dumps(rows) if path.suffix == ".json" else "".join(json.dumps(row) + "\n\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny real encoder with random weights. Equal texts have equal vectors."""
    words = sorted({word for p in PASSAGES for word in Whitespace().pre_tokenize_str(p.contents) for word in word[:1]})
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words, "query", ":"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    folder = tmp_path_factory.mktemp("encoder")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
    )
    BertModel(config).save_pretrained(folder)
    return folder


# --- corpora and indexes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "style"), [("c.jsonl", "wiki"), ("c.jsonl", "plain"), ("c.json", "plain")])
def test_corpus_formats_are_read(tmp_path: Path, name: str, style: str) -> None:
    path = write_corpus(tmp_path / name, style)
    passages_and_bytes = list(read_corpus(path))
    assert [passage for passage, _ in passages_and_bytes] == PASSAGES
    assert passages_and_bytes[-1][1] <= path.stat().st_size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no passages"),
        ('{"id": 1}\n', r"line 1: a passage has `contents`.*got the keys \['id'\]"),
        ('{"title": "a", "text": "b"}\nnot json\n', "line 2 is not JSON"),
        ("[1]\n", "line 1: a passage is an object"),
    ],
)
def test_bad_corpus_raises_an_error_and_leaves_no_index(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        build_index(tmp_path / "c.jsonl", tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


def test_a_damaged_gzip_file_is_a_config_error(tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(b'{"title": "%d", "text": "b"}\n' % number for number in range(20_000)))
    damaged = {"other": b"no gzip file\n", "cut": packed[: len(packed) // 2], "changed": bytearray(packed)}
    damaged["changed"][20:60] = bytes(40)
    for name, data in damaged.items():
        path = tmp_path / f"nq_{name}.jsonl.gz"
        path.write_bytes(data)
        for read in (lambda path: build_index(path, tmp_path / "index"), load_with_rows):
            with pytest.raises(ConfigError, match=f"nq_{name}.*is no gzip file, or is damaged or cut off"):
                read(path)


def test_an_index_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", "plain")
    with pytest.raises(ConfigError, match="cannot be made"):
        build_index(corpus, corpus / "index")


def test_index_on_disk_matches_index_in_memory(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", "wiki")
    reports: list[tuple[str, int, int]] = []
    assert build_index(corpus, tmp_path / "index", progress=lambda *report: reports.append(report)) == 6
    assert reports[-1] == ("words", corpus.stat().st_size, corpus.stat().st_size)
    retriever = open_retriever(str(tmp_path / "index"))
    assert isinstance(retriever, BM25Retriever)
    assert retriever is open_retriever(str(tmp_path / "index"))
    assert retriever.cheap
    assert retriever.search(["compilers", "zurich lakes"], 2) == BM25Retriever.from_passages(PASSAGES).search(
        ["compilers", "zurich lakes"], 2
    )
    passages = MappedPassages(tmp_path / "index")
    assert [passages[index] for index in range(len(passages))] == PASSAGES
    with pytest.raises(ConfigError, match="exists already"):
        build_index(corpus, tmp_path / "index")
    with pytest.raises(ConfigError, match="no vectors: build it with --dense"):
        open_retriever(str(tmp_path / "index"), "dense")


def test_folder_without_an_index_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="agentgym-rl index"):
        open_retriever(str(tmp_path))
    (tmp_path / "manifest.json").write_text('{"format": 99}')
    with pytest.raises(ConfigError, match="format 99"):
        open_retriever(str(tmp_path))


def test_index_command_builds_an_index(tmp_path: Path, encoder_folder: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", "plain")
    run = CliRunner().invoke(app, ["index", str(corpus), "--dense", str(encoder_folder), "--query-prefix", "query: "])
    assert run.exit_code == 0, run.output
    assert "6 passages" in run.output
    assert isinstance(open_retriever(str(tmp_path / "c.index")), HybridRetriever)
    manifest = json.loads((tmp_path / "c.index" / "manifest.json").read_text())
    assert manifest["encoder"] == {"model": str(encoder_folder), "query_prefix": "query: ", "passage_prefix": ""}
    run = CliRunner().invoke(app, ["index", str(tmp_path / "missing.jsonl")])
    assert isinstance(run.exception, ConfigError)
    assert "no such file" in str(run.exception)


# --- ranking ---------------------------------------------------------------------------------------------------------


def test_bm25_ranks_by_words() -> None:
    retriever = BM25Retriever.from_passages(PASSAGES)
    hits = retriever.search(["Who designed the Analytical Engine?", "ZURICH", "translating program", "of the", ""], 2)
    assert titles(hits) == [["Charles Babbage", "Ada Lovelace"], ["Zürich"], ["Compiler", "Ada Lovelace"], [], []]
    assert retriever.search(["compiler"], 0) == [[]]
    assert retriever.search([], 3) == []


def test_bm25_reads_no_query_syntax() -> None:
    retriever = BM25Retriever.from_passages(PASSAGES)
    assert titles(retriever.search(['title:(Zürich) AND -lake "nothing here"~2 ['], 1)) == [["Zürich"]]


def test_bm25_prefers_the_first_of_equal_passages() -> None:
    same = [Passage(str(number), "Same", "one and the same text") for number in range(40)]
    assert [p.id for p in BM25Retriever.from_passages(same).search(["same text"], 5)[0]] == ["0", "1", "2", "3", "4"]


def test_cost_of_a_long_query_is_limited() -> None:
    retriever = BM25Retriever.from_passages(PASSAGES)
    started = time.process_time()
    hits = retriever.search([" ".join(f"word{number}" for number in range(50_000))], 3)
    assert hits == [[]]
    assert time.process_time() - started < 1.0


def test_fusion_prefers_passages_found_by_several_retrievers() -> None:
    a, b, c, d = PASSAGES[:4]
    assert fuse([[a, b, c], [d, b]], 3, 60) == [b, a, d]
    assert fuse([[a], []], 3, 60) == [a]


@pytest.mark.parametrize("rows", [5, 70_000])
def test_nearest_is_exact(rows: int) -> None:
    """Check with fewer and with more rows than one block."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(rows, 4)).astype(np.float32)
    queries = rng.normal(size=(3, 4)).astype(np.float32)
    expected = np.argsort(-(queries @ vectors.T), axis=1, kind="stable")[:, :7]
    assert nearest(vectors, queries, 7) == expected.tolist()


def test_dense_and_hybrid(tmp_path: Path, encoder_folder: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", "wiki")
    build_index(corpus, tmp_path / "index", EncoderSettings(str(encoder_folder)))
    dense = open_retriever(str(tmp_path / "index"), "dense")
    assert isinstance(dense, DenseRetriever)
    assert not dense.cheap
    queries = [passage.contents for passage in PASSAGES] * 10
    assert [hits[0] for hits in dense.search(queries, 2)] == PASSAGES * 10
    assert len(dense.search(["compiler"], 50)[0]) == 6
    assert dense.search([], 2) == []
    vectors = np.load(tmp_path / "index" / "vectors.npy")
    assert vectors.shape == (6, 32)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    hybrid = open_retriever(str(tmp_path / "index"), "hybrid")
    assert not hybrid.cheap
    assert hybrid.search([PASSAGES[3].contents], 1) == [[PASSAGES[3]]]


def test_vectors_do_not_depend_on_the_batch(encoder_folder: Path) -> None:
    """Check that padding is masked."""
    encoder = Encoder(EncoderSettings(str(encoder_folder)))
    together = encoder.passages(PASSAGES)
    alone = np.concatenate([encoder.passages([passage]) for passage in PASSAGES])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_prefixes_and_pooling_are_respected(tmp_path: Path, encoder_folder: Path) -> None:
    encoder = Encoder(EncoderSettings(str(encoder_folder)))
    prefixed = Encoder(EncoderSettings(str(encoder_folder), query_prefix="query: "))
    np.testing.assert_array_equal(prefixed.queries(["compiler"]), encoder.queries(["query: compiler"]))
    for file in encoder_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    first_token_encoder = Encoder(EncoderSettings(str(tmp_path)))
    np.testing.assert_allclose(first_token_encoder.queries(["compiler"]), encoder.queries(["compiler"]), atol=1e-5)
    assert np.abs(first_token_encoder.queries(["compiler lake"]) - encoder.queries(["compiler lake"])).max() > 1e-3


def test_missing_encoder_fails_before_indexing(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", "wiki")
    with pytest.raises(ConfigError, match="needs a Hugging Face encoder at"):
        build_index(corpus, tmp_path / "index", EncoderSettings(str(tmp_path / "nowhere")))
    assert not (tmp_path / "index").exists()


# --- the /retrieve service -------------------------------------------------------------------------------------------


class _Service(BaseHTTPRequestHandler):
    """A /retrieve server over BM25. The path selects its misbehaviour."""

    protocol_version = "HTTP/1.1"
    retriever = BM25Retriever.from_passages(PASSAGES)
    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.bodies.append(body)
        hits = self.retriever.search(body["queries"], body["topk"])
        rows: list[Any] = [
            [{"document": {"id": p.id, "contents": f'"{p.title}"\n{p.text}'}, "score": 1.5} for p in passages]
            for passages in hits
        ]
        match self.path.split("/")[1]:
            case "bare":
                rows = [[row["document"] for row in hit] for hit in rows]
            case "noid":
                rows = [[{"document": {"contents": row["document"]["contents"]}} for row in hit] for hit in rows]
            case "short":
                rows = []
            case "slow":
                time.sleep(3.0)
            case "broken":
                self.send_error(500, "the index is gone")
                return
            case "hangup":
                self.close_connection = True
                return
        if self.path.startswith("/drip"):
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b" ")
                    time.sleep(0.05)
            self.close_connection = True
            return
        answer = b"<html>" if self.path.startswith("/garbage") else json.dumps({"result": rows}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("style", ["", "/bare", "/noid"])
def test_client_parses_the_services_answers(service: str, style: str) -> None:
    retriever = RemoteRetriever(service + style)
    queries = ["Who designed the Analytical Engine?", "zurich"]
    hits = retriever.search(queries, 2)
    assert titles(hits) == titles(_Service.retriever.search(queries, 2))
    assert hits[1][0].text == TEXTS["Zürich"]
    assert _Service.bodies[-1] == {"queries": queries, "topk": 2, "return_scores": True}
    assert len({passage.id for passages in hits for passage in passages}) == 3
    assert not retriever.cheap
    retriever.close()


def test_addresses_with_and_without_the_path(service: str) -> None:
    assert RemoteRetriever(f"{service}/").url == f"{service}/retrieve"
    assert RemoteRetriever(f"{service}/retrieve").url == f"{service}/retrieve"
    with pytest.raises(ConfigError, match="an address like"):
        RemoteRetriever("ftp://example")


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("/garbage", EnvError, "must answer"),
        ("/short", EnvError, "1 queries, 0 results"),
        ("/broken", EnvError, "answered 500"),
        ("/hangup", EnvUnavailable, "cut its answer short"),
        ("/slow", EnvTimeout, "did not answer within 0.4 s"),
        ("/drip", EnvTimeout, "did not answer within 0.4 s"),
    ],
)
def test_broken_service_raises_an_env_error(service: str, path: str, error: type[EnvError], message: str) -> None:
    retriever = RemoteRetriever(service + path, timeout_s=0.4 if error is EnvTimeout else 60.0)
    started = time.monotonic()
    with pytest.raises(error, match=message):
        retriever.search(["compiler"], 1)
    assert time.monotonic() - started < 30.0


def test_missing_service_raises_an_error() -> None:
    with pytest.raises(EnvUnavailable, match="no retrieval service answers"):
        RemoteRetriever("http://127.0.0.1:9").search(["compiler"], 1)


# --- custom data -----------------------------------------------------------------------------------------------------

QUESTIONS = [
    {"question": "Who designed the engine Ada wrote for", "golden_answers": ["Charles Babbage"]},
    {"question": "What did Grace Hopper write?", "golden_answers": ["an early compiler", "a compiler"]},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "nq").mkdir(parents=True)
    (folder / "nq" / "train.jsonl").write_text(json.dumps(QUESTIONS[0]))
    (folder / "nq" / "test.jsonl").write_text(json.dumps(QUESTIONS[1]))
    return folder


def test_environment_variables_choose_data_and_index(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    build_index(write_corpus(tmp_path / "c.jsonl", "wiki"), index)
    monkeypatch.setenv("AGENTGYM_SEARCHQA_DATA", str(data))
    with pytest.raises(ConfigError, match="needs AGENTGYM_SEARCHQA_INDEX together with AGENTGYM_SEARCHQA_DATA"):
        catalog.load("searchqa")
    monkeypatch.setenv("AGENTGYM_SEARCHQA_INDEX", str(index))
    selected = catalog.load("searchqa")
    assert selected is catalog.load("searchqa")
    assert issubclass(selected, SearchQA)
    assert selected.splits == {"train": range(1), "test": range(1, 2)}
    assert selected.cheap
    assert list(catalog.items(selected, "test", "nq")) == [1]
    monkeypatch.delenv("AGENTGYM_SEARCHQA_DATA")
    with pytest.raises(ConfigError, match="needs AGENTGYM_SEARCHQA_DATA"):
        catalog.load("searchqa")
    monkeypatch.delenv("AGENTGYM_SEARCHQA_INDEX")
    assert catalog.load("searchqa") is SearchQA


def test_class_over_custom_data(tmp_path: Path, data: Path) -> None:
    index = tmp_path / "index"
    build_index(write_corpus(tmp_path / "c.jsonl", "wiki"), index)
    env = searchqa_from(data, index, passages_per_search=1)()
    assert env.reset(0) == "Question: Who designed the engine Ada wrote for?"
    step = env.step("<search>engine designed mathematician</search>")
    assert step.observation == f"<information>Doc 1(Title: Charles Babbage) {TEXTS['Charles Babbage']}</information>"
    assert env.step("<answer>charles babbage</answer>").reward == 1.0
    env.reset(1)
    assert env.oracle().endswith("<search>What did Grace Hopper write?</search>")
    env.step(env.oracle())
    assert env.step(env.oracle()).reward == 1.0
    with pytest.raises(IndexError, match="items 0 to 1"):
        env.reset(2)
    assert SearchQA.splits["train"] == range(1450)
    with pytest.raises(ConfigError, match="at least 1 passage"):
        searchqa_from(data, index, passages_per_search=0)


def test_kwargs_of_the_wrong_type_are_a_config_error(tmp_path: Path, data: Path) -> None:
    index = tmp_path / "index"
    build_index(write_corpus(tmp_path / "c.jsonl", "wiki"), index)
    for wrong in ({"passages_per_search": "x"}, {"test_share": "x"}, {"data": 3}):
        with pytest.raises(ConfigError, match=r"environment searchqa: kwargs .* raised TypeError"):
            catalog.load("searchqa", {"data": str(data), "index": str(index), **wrong})
    (index / "offsets.npy").unlink()
    with pytest.raises(ConfigError, match=r"raised FileNotFoundError: .*offsets\.npy"):
        catalog.load("searchqa", {"data": str(data), "index": str(index)})


async def test_dead_service_ends_the_episode_with_an_error(service: str, data: Path) -> None:
    """Check that a dead service raises an error, never a score, and that a live one works."""
    broken = searchqa_from(data, f"{service}/broken")
    assert not broken.cheap
    pool = LocalPool({"good": searchqa_from(data, service), "broken": broken})
    session = await pool.open("good")
    await session.reset(0)
    assert "Charles Babbage" in (await session.step("<search>Analytical Engine</search>")).observation
    session = await pool.open("broken")
    await session.reset(0)
    with pytest.raises(EnvError, match="answered 500"):
        await session.step("<search>Analytical Engine</search>")
    await pool.close()
    with server_in_thread({"searchqa": broken}) as server:
        remote = RemotePool({"searchqa": f"{server.url}/searchqa"})
        session = await remote.open("searchqa")
        await session.reset(0)
        with pytest.raises(EnvError, match="answered 500"):
            await session.step("<search>Analytical Engine</search>")
        await remote.close()
