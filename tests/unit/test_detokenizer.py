"""Text as it streams: the same as decoding at once, never a broken character, and stop strings
wherever they fall.
"""

import random
import re
import sys
from itertools import groupby

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from twinfer.shared.detokenizer import Detokenizer
from twinfer.shared.errors import InternalError
from twinfer.shared.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<s>", "</s>"]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
WORDS = ["▁", "▁▁", "▁the", "the", "▁a", "a", "b", "é", "中", "\n", "▁▁x", "<0x4", "�", "<tool>"]


def build(vocabulary, decoder):
    vocab = {token: index for index, token in enumerate(dict.fromkeys(vocabulary))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoder
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<tool>", normalized=False), "<t c>"])
    return Tokenizer(backend, {}, {})


def byte_level():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    longer = ["".join(random.Random(i).choices(letters, k=2 + i % 4)) for i in range(150)]
    return build([*letters, *longer, "Ġthe", "ĠðŁĺ", "âĤ"], decoders.ByteLevel())


TOKENIZERS = {
    "byte_level": byte_level(),
    "llama": build([*BYTES, *WORDS], decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)])),
    "llama_strip_2": build(
        [*BYTES, *WORDS], decoders.Sequence([*LLAMA, decoders.Strip(" ", 2, 0)])
    ),
    "llama_strip_3": build(
        [*BYTES, *WORDS], decoders.Sequence([*LLAMA, decoders.Strip(" ", 3, 0)])
    ),
    "gemma": build([*BYTES, *WORDS], decoders.Sequence(LLAMA)),
    "metaspace": build(WORDS, decoders.Metaspace()),
    "metaspace_never": build(WORDS, decoders.Metaspace(prepend_scheme="never")),
    "words": build(WORDS, None),
    "wordpiece": build(["the", "##re", "##s", "a", "b"], decoders.WordPiece(cleanup=False)),
}
STREAMED = sorted(set(TOKENIZERS) - {"wordpiece"})


def ids(tokenizer, max_size=14):
    """Sequences with more added tokens than chance would give, and ids that no token has."""
    last = tokenizer.vocab_size + 1
    return st.lists(st.integers(0, last) | st.integers(last - 6, last), max_size=max_size)


def stream(detokenizer, token_ids, size=1):
    text = [detokenizer.append(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
    return "".join(text) + detokenizer.finish()


def settled(tokenizer, prompt, skip):
    """How much of the prompt's text is its own: what it gives before `finish`."""
    return Detokenizer(tokenizer, (), skip).append(prompt)


def runs(tokenizer, token_ids, skip):
    """Runs of byte tokens, as the library's decoder sees them: skipped and unknown tokens do not
    end one.
    """
    run = b""
    for token_id in token_ids:
        text = tokenizer.token_text(token_id)
        if text is None or (skip and token_id in tokenizer.special_ids):
            continue
        match = re.fullmatch("<0x(..)>", text) if tokenizer.rule.byte_fallback else None
        if match:
            run += bytes([int(match[1], 16)])
        elif run:
            yield run
            run = b""
    if run:
        yield run


def is_utf8(run):
    try:
        run.decode()
    except UnicodeDecodeError:
        return False
    return True


def nothing_complete_before_a_wrong_byte(run):
    """Whether streaming can agree with the library on a run that is not UTF-8."""
    return is_utf8(run) or not any(is_utf8(run[:length]) for length in range(1, len(run)))


# Equal to decoding at once


@pytest.mark.parametrize("name", STREAMED)
@given(data=st.data(), skip=st.booleans(), size=st.integers(1, 4))
def test_equals_decoding_at_once(name, data, skip, size):
    tokenizer = TOKENIZERS[name]
    prompt, output = data.draw(ids(tokenizer, 6)), data.draw(ids(tokenizer))
    assume(
        all(
            nothing_complete_before_a_wrong_byte(run)
            for run in runs(tokenizer, prompt + output, skip)
        )
    )
    whole = tokenizer.decode(prompt + output, skip)
    text = stream(Detokenizer(tokenizer, prompt, skip), output, size)
    assert settled(tokenizer, prompt, skip) + text == whole


BYTE_IDS = st.sampled_from(
    [0x0A, 0x41, 0x80, 0xA9, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0xED, 0xA0, 0xFF, 0xC0]
)


@given(st.lists(BYTE_IDS, max_size=6), st.lists(BYTE_IDS, max_size=10))
def test_bytes_of_a_byte_level_tokenizer(prompt, output):
    """Rust's replacement of wrong bytes and Python's agree, wherever the sequence is cut."""
    tokenizer = TOKENIZERS["byte_level"]
    by_byte = {tokenizer.piece(i): i for i in range(256)}
    prompt, output = ([by_byte[bytes([byte])] for byte in part] for part in (prompt, output))
    text = stream(Detokenizer(tokenizer, prompt), output)
    assert settled(tokenizer, prompt, True) + text == tokenizer.decode(prompt + output)


@given(st.lists(BYTE_IDS | st.integers(256, 269), max_size=16), st.integers(0, 16))
def test_runs_of_wrong_bytes_keep_what_was_emitted(token_ids, cut):
    """The exception that the docstring states: complete characters before the first wrong byte
    of a run stay.
    """
    tokenizer = TOKENIZERS["gemma"]
    expected = ""
    for is_byte, group in groupby(token_ids, key=lambda token_id: token_id < 256):
        run = list(group)
        expected += _lenient(bytes(run)) if is_byte else tokenizer.decode(run, False)
    detokenizer = Detokenizer(tokenizer, (), False)
    text = (
        detokenizer.append(token_ids[:cut])
        + detokenizer.append(token_ids[cut:])
        + detokenizer.finish()
    )
    assert text == expected


def _lenient(run):
    good = max((n for n in range(len(run) + 1) if is_utf8(run[:n])), default=0)
    return run[:good].decode() + "\ufffd" * (len(run) - good)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(data=st.data())
def test_text_does_not_depend_on_how_tokens_arrive(name, data):
    tokenizer = TOKENIZERS[name]
    prompt, output = data.draw(ids(tokenizer, 6)), data.draw(ids(tokenizer))
    stop = tuple(data.draw(st.lists(st.text("the a\n\ufffd", min_size=1, max_size=3), max_size=2)))
    results = []
    for size in (1, 3, 100):
        detokenizer = Detokenizer(tokenizer, prompt, stop=stop)
        results.append(
            (
                stream_until_stop(detokenizer, output, size),
                detokenizer.stopped,
                detokenizer.num_tokens,
            )
        )
    assert results[0] == results[1] == results[2]


def stream_until_stop(detokenizer, token_ids, size):
    text = ""
    for i in range(0, len(token_ids), size):
        text += detokenizer.append(token_ids[i : i + size])
    return text + detokenizer.finish()


def test_the_library_decides_where_no_rule_is_known():
    tokenizer = TOKENIZERS["wordpiece"]
    assert tokenizer.rule.kind == "other"
    output = [tokenizer.token_id(token) for token in ("the", "##re", "a", "</s>", "b", "##s")]
    prompt = [tokenizer.token_id("a")]
    text = stream(Detokenizer(tokenizer, prompt), output)
    assert text == tokenizer.decode(prompt + output)[1:] == " there a bs"


# Characters that are split


def test_no_broken_character_is_emitted_early():
    tokenizer = TOKENIZERS["byte_level"]
    by_byte = {tokenizer.piece(i): i for i in range(256)}
    text = "é€😀👩‍👩‍👧中"
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.append([by_byte[bytes([byte])]]) for byte in text.encode()]
    assert "".join(parts) == text
    assert [part for part in parts if part] == list(text)
    assert detokenizer.finish() == ""


def test_byte_tokens_of_llama():
    tokenizer = TOKENIZERS["llama"]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.append([byte]) for byte in "é\n😀".encode()] == [
        "",
        "é",
        "\n",
        "",
        "",
        "",
        "😀",
    ]
    assert detokenizer.append([0xF0, 0x9F]) == ""
    assert detokenizer.append([tokenizer.token_id("▁a")]) == "\ufffd\ufffd a"
    assert detokenizer.append([0xE2, 0x82]) == ""
    assert detokenizer.finish() == "\ufffd\ufffd"


def test_a_character_that_the_prompt_begins():
    for name, count in (("byte_level", 1), ("llama", 2)):
        tokenizer = TOKENIZERS[name]
        euro = [
            next(i for i in range(256) if tokenizer.piece(i) == bytes([byte]))
            for byte in "€".encode()
        ]
        before = [tokenizer.vocab_size - 4] * 3 + euro[:2]
        assert Detokenizer(tokenizer, before).append(euro[2:]) == "€"
        assert Detokenizer(tokenizer, before).finish() == "\ufffd" * count


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma"])
def test_a_character_split_between_prompt_and_output_anywhere(name):
    tokenizer = TOKENIZERS[name]
    by_byte = {tokenizer.piece(i): i for i in range(256)}
    encoded = [by_byte[bytes([byte])] for byte in "aé€😀".encode()]
    for cut in range(len(encoded) + 1):
        before = Detokenizer(tokenizer).append(encoded[:cut])
        assert before + stream(Detokenizer(tokenizer, encoded[:cut]), encoded[cut:]) == "aé€😀"


def test_added_tokens_are_their_own_text():
    tokenizer = TOKENIZERS["byte_level"]
    assert stream(Detokenizer(tokenizer), [tokenizer.token_id("<t c>")]) == "<t c>"


def test_leading_space():
    tokenizer = TOKENIZERS["llama"]
    the, start = tokenizer.token_id("▁the"), tokenizer.token_id("<s>")
    assert Detokenizer(tokenizer).append([the, the]) == "the the"
    assert Detokenizer(tokenizer, [start]).append([the, the]) == "the the"
    assert Detokenizer(tokenizer, [start], skip_special_tokens=False).append([the]) == " the"
    assert Detokenizer(tokenizer, [start, the]).append([the]) == " the"
    assert Detokenizer(tokenizer, [start, tokenizer.token_id("▁")]).append([the]) == " the"
    assert Detokenizer(tokenizer, [10]).append([the]) == " the"
    two = TOKENIZERS["llama_strip_2"]
    a, space = two.token_id("a"), two.token_id("▁")
    assert Detokenizer(two, [space]).append([the]) == "the"
    assert Detokenizer(two, [space, space]).append([the]) == " the"
    assert Detokenizer(two, [a, space]).append([the]) == " the"
    assert Detokenizer(TOKENIZERS["llama_strip_3"], [space, a, space]).append([the]) == " the"


def test_special_tokens():
    tokenizer = TOKENIZERS["byte_level"]
    end, tool = tokenizer.token_id("</s>"), tokenizer.token_id("<tool>")
    assert stream(Detokenizer(tokenizer), [tool, end]) == "<tool>"
    assert stream(Detokenizer(tokenizer, skip_special_tokens=False), [tool, end]) == "<tool></s>"


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_long_runs_of_incomplete_bytes_take_linear_time(name):
    tokenizer = TOKENIZERS[name]
    lead = next(i for i in range(256) if tokenizer.piece(i) == b"\xf0")

    detokenizer = Detokenizer(tokenizer, [lead] * 1000)
    early = [calls(detokenizer, lead) for _ in range(40)]
    for _ in range(4000):
        detokenizer.append([lead])
    late = [calls(detokenizer, lead) for _ in range(40)]
    assert max(late) <= max(early)


def calls(detokenizer, token):
    """Functions that one `append` calls, those in C included: what it costs, whatever else the
    machine does.
    """
    count = 0

    def see(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        detokenizer.append([token])
    finally:
        sys.setprofile(None)
    return count


# Stop strings


def naive(text_parts, stop, include):
    """What the docstring says, by looking at every prefix: (text, stop string, parts taken)."""
    text = ""
    for taken, part in enumerate(text_parts, 1):
        for character in part:
            text += character
            ends = [string for string in stop if text.endswith(string)]
            if ends:
                longest = max(ends, key=len)
                return (text if include else text[: -len(longest)]), longest, taken
    return text, None, len(text_parts)


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=500)
@given(st.lists(st.sampled_from(["a", "b", "▁a", "\n"]), max_size=20), STOPS, st.booleans())
def test_stop_strings_as_the_docstring_says(tokens, stop, include):
    tokenizer = TOKENIZERS["gemma"]
    parts = [tokenizer.decode([tokenizer.token_id(token)]) for token in tokens]
    detokenizer = Detokenizer(tokenizer, stop=tuple(stop), include_stop=include)
    text = stream(detokenizer, [tokenizer.token_id(token) for token in tokens])
    assert (text, detokenizer.stopped, detokenizer.num_tokens) == naive(parts, stop, include)


@given(st.lists(st.sampled_from("ab\n"), max_size=20), STOPS)
def test_nothing_of_a_stop_string_is_emitted_and_nothing_else_is_held(tokens, stop):
    tokenizer = TOKENIZERS["gemma"]
    detokenizer = Detokenizer(tokenizer, stop=tuple(stop))
    emitted = seen = ""
    for token in tokens:
        emitted += detokenizer.append([tokenizer.token_id(token)])
        if detokenizer.stopped is not None:
            break
        seen += token
        held = max(
            n
            for n in range(len(seen) + 1)
            if any(s.startswith(seen[len(seen) - n :]) for s in stop)
        )
        assert emitted == seen[: len(seen) - held]


def detokenized(tokens, stop, **options):
    tokenizer = TOKENIZERS["gemma"]
    detokenizer = Detokenizer(tokenizer, stop=stop, **options)
    text = detokenizer.append([tokenizer.token_id(token) for token in tokens])
    return text + detokenizer.finish(), detokenizer.stopped, detokenizer.num_tokens


def test_stop_strings():
    assert detokenized("abba", ("bb",)) == ("a", "bb", 3)
    assert detokenized("abba", ("bb",), include_stop=True) == ("abb", "bb", 3)
    assert detokenized("abba", ("bba", "bb")) == ("a", "bb", 3)
    assert detokenized("aab", ("b", "ab")) == ("a", "ab", 3)
    assert detokenized("aaab", ("aab",)) == ("a", "aab", 4)
    assert detokenized("aba", ("abab", "b")) == ("a", "b", 2)
    assert detokenized(["a", "▁the", "b"], ("he",)) == ("a t", "he", 2)
    assert detokenized(["a", "▁the", "b"], ("he",), include_stop=True) == ("a the", "he", 2)
    assert detokenized("ab", ("abc",)) == ("ab", None, 2)
    assert detokenized("", ("abc",)) == ("", None, 0)
    assert detokenized(["a", "<0x0A>", "b"], ("\n",)) == ("a", "\n", 2)
    assert detokenized(["a", "</s>", "b"], ("</s>",)) == ("ab", None, 3)
    assert detokenized(["a", "</s>", "b"], ("</s>",), skip_special_tokens=False) == ("a", "</s>", 2)


def test_a_stop_string_that_only_finish_completes():
    assert detokenized(["a", "<0xF0>"], ("\ufffd",)) == ("a", "\ufffd", 2)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_some_special_tokens_may_be_shown(name):
    tokenizer = TOKENIZERS[name]
    begin, end = map(tokenizer.token_id, SPECIAL)
    word = tokenizer.token_id("a" if name != "wordpiece" else "the")
    written = [begin, word, end, word, begin, begin]
    detokenizer = Detokenizer(tokenizer, stop=("<s><s>",))
    detokenizer.show([begin])
    text = stream(detokenizer, written)
    if detokenizer.stopped:
        text += detokenizer.stopped
    assert text == tokenizer.decode([one for one in written if one != end], False)
    assert "</s>" not in text


def test_tokens_after_a_stop_string_are_not_taken():
    tokenizer = TOKENIZERS["gemma"]
    a, b = tokenizer.token_id("a"), tokenizer.token_id("b")
    detokenizer = Detokenizer(tokenizer, stop=("b",))
    assert detokenizer.append([a, b, a, a]) == "a"
    assert detokenizer.append([a]) == ""
    assert detokenizer.num_tokens == 2
    assert detokenizer.finish() == ""
    assert detokenizer.finish() == ""


def test_stop_strings_in_the_first_tokens_do_not_count():
    assert detokenized("babab", ("b",), min_tokens=1) == ("ba", "b", 3)
    assert detokenized("babab", ("b",), min_tokens=3) == ("baba", "b", 5)
    assert detokenized("babab", ("ba",), min_tokens=5) == ("babab", None, 5)
    assert detokenized("aab", ("aab", "aa"), min_tokens=2) == ("", "aab", 3)


def test_the_prompt_is_not_searched():
    tokenizer = TOKENIZERS["gemma"]
    a, b = tokenizer.token_id("a"), tokenizer.token_id("b")
    detokenizer = Detokenizer(tokenizer, [a], stop=("ab",))
    assert stream(detokenizer, [b]) == "b"
    assert detokenizer.stopped is None


@pytest.mark.parametrize("name", ["gemma", "words", "wordpiece"])
def test_texts_go_on_behind_a_place_where_all_is_settled(name):
    tokenizer = TOKENIZERS[name]
    tokens = [tokenizer.token_id(token) for token in ("a", "b", "the", "a")]
    detokenizer = Detokenizer(tokenizer)
    text = ""
    for token in tokens:
        text += detokenizer.append([token]) + detokenizer.settle()
    assert text + detokenizer.finish() == tokenizer.decode(tokens)


def test_what_is_settled_begins_neither_a_stop_string_nor_a_character():
    tokenizer = TOKENIZERS["gemma"]
    a, b, byte, rest = (tokenizer.token_id(t) for t in ("a", "b", "<0xC3>", "<0xA9>"))
    detokenizer = Detokenizer(tokenizer, stop=("ab", "ba"))
    assert detokenizer.append([a]) == ""
    assert detokenizer.settle() == "a"
    assert detokenizer.append([b]) == ""
    assert detokenizer.settle() == "b"
    assert detokenizer.append([byte]) == ""
    assert detokenizer.settle() == "\ufffd"
    assert detokenizer.append([rest]) + detokenizer.settle() == "\ufffd"
    assert detokenizer.append([a, b]) + detokenizer.settle() == ""
    assert (detokenizer.stopped, detokenizer.settle(), detokenizer.finish()) == ("ab", "", "")


def test_nothing_follows_finish():
    detokenizer = Detokenizer(TOKENIZERS["gemma"])
    detokenizer.finish()
    with pytest.raises(InternalError):
        detokenizer.append([1])


def test_long_stop_strings_take_linear_time():
    tokenizer = TOKENIZERS["gemma"]
    a = tokenizer.token_id("a")
    stop = tuple("a" * length + "b" for length in range(240, 256))
    detokenizer = Detokenizer(tokenizer, stop=stop)
    early = [calls(detokenizer, a) for _ in range(300)]
    text = "".join(detokenizer.append([a]) for _ in range(49_400))
    late = [calls(detokenizer, a) for _ in range(300)]
    assert max(late) <= max(early)
    assert 49_000 < len(text) < 50_000  # but for what may yet be the start of a stop string
