"""Tokens and events of texts that a model might write."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from twinfer.serving.formats.events import ContentText, ReasoningText, ToolCallArguments
from twinfer.shared.tokenizer import Tokenizer


def joined(events):
    """Events with neighbours of a kind joined."""
    out = []
    for event in events:
        last = out[-1] if out else None
        if type(event) is type(last) and isinstance(event, (ContentText, ReasoningText)):
            out[-1] = type(event)(last.text + event.text)
        elif type(event) is type(last) and isinstance(event, ToolCallArguments):
            out[-1] = ToolCallArguments(event.index, last.text + event.text)
        else:
            out.append(event)
    return out


def byte_tokenizer(special, added=()):
    """A tokenizer whose tokens are bytes, and some whole texts."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    return Tokenizer(backend, {}, {})
