"""The tokenizer of a folder: the same ids and texts as transformers, on small tokenizers that
are built here.
"""

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Backend

from twinfer.shared import tokenizer
from twinfer.shared.errors import ModelError, ModelNotFound, PromptTooLong, RequestError
from twinfer.shared.tokenizer import DecodeRule, Tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog. the them then there",
    "def read(path):\n    with open(path) as file:\n        return file.read()\n",
    "naïve café, Ærøskøbing, Ελληνικά, русский, 中文字, 日本語",
]
SAMPLES = [
    "",
    " ",
    "the dog",
    " the dog",
    "  two  spaces  ",
    "line\nline\r\n\n\ttab",
    "<s>the</s> dog<|end|>  <|end|>the",
    "<tool> call </tool>",
    "emoji 👩‍👩‍👧 é e\u0301 \u200b \ufffd \0",
    "中文字符 русский текст مرحبا",
    "<0x0A>▁Ġ",
    "a" * 300,
]


def byte_level():
    """As Llama 3, Qwen and the demo model have it: byte-level BPE, added tokens, no normalizer."""
    backend = Backend(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+| ?[^\s\p{L}]+|\s+"), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    backend.add_tokens(["<tool>", AddedToken("</tool>", normalized=False)])
    start = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A $B:1", special_tokens=[start]
            ),
        ]
    )
    return backend


def llama_style(scheme="first", normalizer=None):
    """As SentencePiece models are converted: spaces are ▁, unknown characters are byte tokens."""
    backend = Backend(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=names, show_progress=False)
    backend.train_from_iterator([line for text in TEXT[:2] for line in text.splitlines()], trainer)
    state = json.loads(backend.to_str())
    # byte tokens are plain entries of the vocabulary
    state["added_tokens"] = state["added_tokens"][:3]
    backend = Backend.from_str(json.dumps(state))
    backend.pre_tokenizer = (
        None if normalizer else pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    )
    if normalizer:
        backend.normalizer = normalizer
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(parts if scheme != "never" else parts[:3])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


LLAMA_2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


def write(folder, backend, config=PLAIN, **files):
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def oracle(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def assert_equal(folder, samples=SAMPLES):
    ours, theirs = Tokenizer.load(folder), oracle(folder)
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    for text in samples:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, text
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert [ours.token_text(i) for i in range(len(theirs))] == theirs.convert_ids_to_tokens(
        range(len(theirs))
    )
    return ours


FOLDERS = {
    "byte_level": lambda: (byte_level(), PLAIN),
    "no_config": lambda: (byte_level(), None),
    "generic_class": lambda: (byte_level(), PLAIN | {"tokenizer_class": "TokenizersBackend"}),
    "byte_level_llama_class": lambda: (
        byte_level(),
        PLAIN | {"tokenizer_class": "LlamaTokenizerFast"},
    ),
    "llama_first": lambda: (llama_style(), PLAIN),
    "llama_first_class": lambda: (
        llama_style(),
        PLAIN | {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>"},
    ),
    "llama_never": lambda: (llama_style("never"), PLAIN),
    "llama_2": lambda: (llama_style(normalizer=LLAMA_2), PLAIN),
}


@pytest.fixture(scope="module", params=sorted(FOLDERS))
def folder(request, tmp_path_factory):
    backend, config = FOLDERS[request.param]()
    return write(tmp_path_factory.mktemp("tokenizers") / request.param, backend, config)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    made = [write(root / name, *FOLDERS[name]()) for name in sorted(FOLDERS)]
    return [(Tokenizer.load(folder), oracle(folder)) for folder in made]


def test_equals_transformers(folder):
    assert_equal(folder)


@given(
    st.text(max_size=40) | st.text(st.sampled_from("the dog <s>/▁Ġé中👩\n\t."), max_size=40),
    st.booleans(),
)
def test_any_text_equals_transformers(pairs, text, special):
    for ours, theirs in pairs:
        ids = theirs.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == ids
        assert ours.decode(ids, not special) == theirs.decode(ids, skip_special_tokens=not special)


@given(st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_any_ids_equal_transformers(pairs, ids, skip):
    for ours, theirs in pairs:
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_the_file_goes_before_what_transformers_builds_for_a_class_name(tmp_path):
    """Llama 2 as published: `LlamaTokenizer` of transformers 5 drops the file's normalizer, and a
    leading space too.

    SentencePiece, which the model was trained with, keeps that space, and so does the file.
    """
    folder = write(
        tmp_path / "x",
        llama_style(normalizer=LLAMA_2),
        PLAIN | {"tokenizer_class": "LlamaTokenizer"},
    )
    ours, file = Tokenizer.load(folder), Backend.from_file(str(folder / "tokenizer.json"))
    for text in (*SAMPLES, " the"):
        assert ours.encode(text) == file.encode(text).ids
    assert ours.token_text(ours.encode(" the", add_special_tokens=False)[0]) == "▁"
    assert ours.decode(ours.encode(" the")) == " the"


# Tokens that only tokenizer_config.json names

NEW = {
    "content": "<new>",
    "lstrip": True,
    "rstrip": False,
    "single_word": False,
    "normalized": False,
    "special": False,
}


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": "<new>", "eos_token": None},
        {"eos_token": {"__type": "AddedToken", **NEW}},
        {"extra_special_tokens": ["<x>", "<tool>"]},
        {"additional_special_tokens": ["<x>", "<y>", "<x>"]},
        {"extra_special_tokens": {"image_token": "<image>", "video_token": "<video>"}},
        {
            "image_token": "<image>",
            "boi_token": "<tool>",
            "add_bos_token": True,
            "add_eos_token": True,
        },
        {"added_tokens_decoder": {"341": NEW | {"special": True}, "340": NEW | {"content": "<z>"}}},
        {
            "added_tokens_decoder": {
                "333": NEW | {"content": "<tool>", "lstrip": False, "special": True}
            }
        },
        {
            "added_tokens_decoder": {"340": NEW},
            "eos_token": "<new>",
            "extra_special_tokens": ["<w>"],
        },
        {"clean_up_tokenization_spaces": True, "model_max_length": 3, "padding_side": "left"},
        {"split_special_tokens": True},
        {"pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>"},
    ],
)
def test_more_tokens(tmp_path, config):
    folder = write(tmp_path / "x", byte_level(), PLAIN | config)
    ours = assert_equal(folder, [*SAMPLES, "a <new> b<x><y> <z><image> <tool> x", "<pad><unk><w>"])
    theirs = oracle(folder)
    assert ours.special_ids == {
        i for i, token in theirs.added_tokens_decoder.items() if token.special
    }


def test_special_tokens_map_of_old_folders(tmp_path):
    roles = {
        "eos_token": NEW | {"content": "<old>"},
        "pad_token": "<p>",
        "additional_special_tokens": ["<q>"],
    }
    for value in roles.values():
        if isinstance(value, dict):
            del value["special"]
    folder = write(tmp_path / "x", byte_level(), PLAIN, special_tokens_map=roles)
    ours = assert_equal(folder, [*SAMPLES, "x <old><p><q>"])
    assert ours.special_tokens["eos_token"] == "<old>"


def test_stored_limits_do_not_cut_prompts(tmp_path):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_token="</s>")
    ours = assert_equal(write(tmp_path / "x", backend, PLAIN | {"pad_token": "</s>"}))
    assert len(ours.encode("the dog " * 50)) > 50


# Its own surface


def test_no_tokenizer_file(tmp_path):
    assert Tokenizer.load(tmp_path) is None
    with pytest.raises(ModelNotFound, match="no such folder"):
        Tokenizer.load(tmp_path / "no")


def test_vocab_size_covers_the_highest_id(tmp_path):
    backend = Backend(models.BPE(vocab={"a": 0, "b": 7}, merges=[]))
    tokenizer = Tokenizer.load(write(tmp_path / "x", backend, {}))
    assert tokenizer.vocab_size == 8
    assert [tokenizer.token_text(i) for i in (0, 3, 7, 8, -1, 2**40)] == [
        "a",
        None,
        "b",
        None,
        None,
        None,
    ]
    assert tokenizer.bos_token_id is None
    assert tokenizer.eos_token_id is None


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", None, 5, b"x", ["x"]])
def test_what_is_no_text(folder, text):
    with pytest.raises(RequestError, match=r"^prompt: ") as caught:
        Tokenizer.load(folder).encode(text)
    assert "\n" not in str(caught.value)


class Seen:
    """A backend that keeps the length of the longest text that it had to split."""

    def __init__(self, backend):
        self._backend, self.longest = backend, 0

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def encode(self, text, **options):
        self.longest = max(self.longest, len(text))
        return self._backend.encode(text, **options)

    def encode_batch_fast(self, texts, **options):
        self.longest = max(self.longest, *map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)


def test_a_text_that_is_far_too_long_is_never_split_whole(folder):
    """Its tokens would take hundreds of times its memory."""
    loaded = Tokenizer.load(folder)
    loaded._backend = seen = Seen(loaded._backend)
    with pytest.raises(PromptTooLong, match="got more than 2000 tokens, allowed is at most 1000"):
        loaded.encode("the dog\n" * 50_000, most=1000)
    assert seen.longest == tokenizer.PIECE
    with pytest.raises(PromptTooLong, match=r"got 1\d\d\d tokens, allowed is at most 1000"):
        loaded.encode("the dog\n" * 260, most=1000)


def of_words():
    """Any number of spaces counts for nothing, any unknown characters for one token."""
    backend = Backend(models.WordLevel({"<unk>": 0, "the": 1, "dog": 2}, unk_token="<unk>"))
    backend.normalizer = normalizers.Strip()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


PARTS = st.lists(
    st.tuples(st.text("the dog <s>/▁Ġé中👩\n\t.", max_size=9), st.integers(1, 60)), max_size=9
)


@settings(max_examples=12)  # of nine tokenizers each
@given(PARTS)
def test_whatever_is_short_enough_is_taken(pairs, words_alone, parts):
    check_that_it_is_taken_if_short_enough(pairs, words_alone, parts)


@pytest.mark.slow
@settings(max_examples=40)
@given(PARTS)
def test_whatever_is_short_enough_is_taken_of_more_texts(pairs, words_alone, parts):
    check_that_it_is_taken_if_short_enough(pairs, words_alone, parts)


def check_that_it_is_taken_if_short_enough(pairs, words_alone, parts):
    """Though its pieces are counted one by one, here from the first character on."""
    text = "".join(part * times for part, times in parts)
    with (
        mock.patch.object(tokenizer, "PIECE", 40),
        mock.patch.object(tokenizer, "CHARS_PER_TOKEN", 0),
    ):
        for one in (*(ours for ours, _ in pairs), words_alone):
            ids = one.encode(text)
            assert one.encode(text, most=len(ids)) == ids
            if ids:
                with pytest.raises(PromptTooLong):
                    one.encode(text, most=len(ids) - 1)


@pytest.fixture(scope="module")
def words_alone(tmp_path_factory):
    return Tokenizer.load(write(tmp_path_factory.mktemp("words"), of_words(), None))


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library keeps what it likes"
)
def test_threads_keep_nothing_of_large_texts():
    """It was some 300 bytes a token, in each thread that had split one."""
    measure = """
import re, sys
from concurrent.futures import ThreadPoolExecutor
from twinfer.shared.tokenizer import Tokenizer
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
loaded = Tokenizer.load(sys.argv[1])
with ThreadPoolExecutor(1) as thread:
    before = resident()
    assert len(thread.submit(loaded.encode, "x " * 100_000).result()) == 100_001
    print(resident() - before)
"""
    folder = Path(tokenizer.__file__).parent / "models" / "demo"
    done = subprocess.run(
        [sys.executable, "-P", "-c", measure, str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 15


@pytest.mark.parametrize("ids", [[-1], [2**32], [2**70], ["1"], [1.0], [None], [[1]]])
def test_what_is_no_id(folder, ids):
    with pytest.raises(RequestError, match=r"^tokens: "):
        Tokenizer.load(folder).decode(ids)


def test_ids_that_no_token_has_are_nothing(folder):
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("the dog")
    assert tokenizer.decode([9999, *ids, 2**32 - 1]) == "the dog"
    assert tokenizer.piece(9999) is None
    assert tokenizer.piece(-1) is None


@pytest.mark.parametrize(
    ("decoder", "rule"),
    [
        (decoders.ByteLevel(), DecodeRule("bytes")),
        (decoders.Sequence([decoders.ByteLevel()]), DecodeRule("bytes")),
        (decoders.Metaspace(), DecodeRule("text", replace=(("▁", " "),), first_drops="▁")),
        (decoders.Metaspace(prepend_scheme="never"), DecodeRule("text", replace=(("▁", " "),))),
        (decoders.Fuse(), DecodeRule("text")),
        (decoders.ByteFallback(), DecodeRule("text", byte_fallback=True)),
        (None, DecodeRule("text", separator=" ")),
        (decoders.WordPiece(), DecodeRule("other")),
        (decoders.BPEDecoder(), DecodeRule("other")),
        (decoders.Strip(" ", 1, 0), DecodeRule("other")),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]), DecodeRule("other")),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), DecodeRule("other")),
        (
            decoders.Sequence([decoders.ByteFallback(), decoders.Replace("a", "b")]),
            DecodeRule("other"),
        ),
        (decoders.Replace(Regex("a+"), "b"), DecodeRule("other")),
    ],
)
def test_decode_rules(tmp_path, decoder, rule):
    backend = byte_level()
    backend.decoder = decoder
    assert Tokenizer.load(write(tmp_path / "x", backend)).rule == rule


# Chat templates


def template_names(tmp_path, config, **files):
    folder = write(tmp_path / "x", byte_level(), PLAIN | config)
    for name, text in files.items():
        path = folder / f"{name}.jinja"
        if name != "chat_template":
            path = folder / "additional_chat_templates" / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
    theirs = oracle(folder).chat_template
    theirs = {"default": theirs} if isinstance(theirs, str) else theirs or {}
    ours = Tokenizer.load(folder).chat_templates
    assert ours == theirs
    return ours


def test_chat_templates(tmp_path):
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    assert template_names(tmp_path, {}) == {}
    assert template_names(tmp_path, {"chat_template": "A"}) == {"default": "A"}
    assert template_names(tmp_path, {"chat_template": named}) == {"default": "A", "tool_use": "B"}
    file = {"chat_template": "F\r\nF\n"}
    assert template_names(tmp_path, {"chat_template": named}, **file) == {"default": "F\nF\n"}
    assert template_names(tmp_path, {}, tool_use="T", rag="R", **file).keys() == {
        "default",
        "tool_use",
        "rag",
    }


# Malformed files


def fails(folder, *words):
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    for word in (str(folder), *words):
        assert word in message, message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"{}",
        b'{"version": "1.0", "model": {"type": "Nonsense"}}',
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}}',
        b'{"version": "9.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
        b'{"model": {"type": "Unigram", "vocab": [], "unk_id": 5}}',
        b"[" * 100_000,
    ],
)
def test_malformed_tokenizer_json(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    fails(tmp_path, "tokenizer.json")


def test_a_vocabulary_without_words_is_refused(tmp_path):
    """Every prompt would be empty."""
    tokens = {"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    fails(tmp_path, "tokenizer.json", "model.vocab is empty")


def test_every_part_of_a_tokenizer_may_be_nonsense(tmp_path):
    """Each part in turn replaced by something else: a tokenizer or one line, never anything
    else.
    """
    whole = json.loads(llama_style().to_str())
    for name in whole:
        for nonsense in (
            None,
            5,
            "x",
            [],
            {},
            {"type": "x"},
            {"type": "Sequence", "decoders": []},
            [None],
            [{}],
        ):
            (tmp_path / "tokenizer.json").write_text(json.dumps(whole | {name: nonsense}))
            try:
                tokenizer = Tokenizer.load(tmp_path)
            except ModelError as error:
                message = str(error)
            else:
                message = ""
                tokenizer.decode(tokenizer.encode("the dog"))
            assert "\n" not in message


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"\xff", b"[" * 100_000])
def test_malformed_json_files(tmp_path, name, content):
    write(tmp_path, byte_level(), None)
    (tmp_path / name).write_bytes(content)
    fails(tmp_path, name)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"eos_token": 5}, ["eos_token is 5"]),
        ({"bos_token": ["<s>"]}, ["bos_token"]),
        ({"bos_token": [1]}, ["bos_token is [1]"]),
        ({"image_token": "\ud800"}, ["image_token is '\\ud800'"]),
        ({"bos_token": {}}, ["bos_token is {}"]),
        ({"bos_token": {"content": "x", "lstrip": "yes"}}, ["bos_token"]),
        ({"x\n_token": {}}, ["_token"]),
        ({"added_tokens_decoder": []}, []),
        ({"added_tokens_decoder": [5]}, ["added_tokens_decoder is [5]"]),
        ({"added_tokens_decoder": {"x": NEW}}, ["added_tokens_decoder"]),
        ({"added_tokens_decoder": {"5": None}}, ["added_tokens_decoder is None"]),
        ({"extra_special_tokens": "abc"}, ["extra_special_tokens is abc"]),
        ({"extra_special_tokens": [5]}, ["extra_special_tokens is 5"]),
        ({"chat_template": 5}, ["chat_template is 5"]),
        ({"chat_template": ["x"]}, ["chat_template"]),
        ({"chat_template": [{"name": "default"}]}, ["chat_template"]),
        ({"chat_template": [{"name": "default", "template": 5}]}, ["chat_template"]),
        ({"chat_template": [{"name": [], "template": "x"}]}, ["chat_template"]),
    ],
)
def test_malformed_config(tmp_path, config, words):
    write(tmp_path, byte_level(), config)
    if words:
        fails(tmp_path, "tokenizer_config.json", *words)
    else:
        Tokenizer.load(tmp_path)


def test_malformed_template_file(tmp_path):
    write(tmp_path, byte_level())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    fails(tmp_path, "chat_template.jinja", "UTF-8")


def test_clean_up_that_changes_texts_is_refused(tmp_path):
    backend = Backend(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    fails(
        write(tmp_path, backend, {"clean_up_tokenization_spaces": True}),
        "clean_up_tokenization_spaces",
    )
    write(tmp_path, backend, {"clean_up_tokenization_spaces": False})
    assert Tokenizer.load(tmp_path).decode([0, 1]) == "a ?"


def test_code_of_a_model_is_not_run(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    config = {
        "auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]},
        "tokenizer_class": "EvilTokenizer",
    }
    write(tmp_path, byte_level(), PLAIN | config)
    assert Tokenizer.load(tmp_path).encode("the")
