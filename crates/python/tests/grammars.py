"""Bitmasks of grammar engines for prefixes of one regular expression. Each token is a byte."""

import importlib

import numpy
from conftest import library

REGEX = "[0-9]{1,3}(cm|km)"
# The bytes that may follow each prefix. None: only the end token.
FOLLOWING = {"": "0123456789", "7": "0123456789ck", "123": "ck", "12k": "m", "9": "0123456789ck", "12km": None}


def _llguidance():
    engine = library("llguidance")
    masks = importlib.import_module("llguidance.numpy")
    tokenizer = engine.LLTokenizer("byte")
    grammar = engine.LLMatcher.grammar_from_regex(REGEX)
    mask = masks.allocate_token_bitmask(len(FOLLOWING), tokenizer.vocab_size)
    for row, text in enumerate(FOLLOWING):
        matcher = engine.LLMatcher(tokenizer, grammar)
        assert matcher.consume_tokens([*text.encode()])
        masks.fill_next_token_bitmask(matcher, mask, row)
    return mask, tokenizer.vocab_size, tokenizer.eos_token


def _xgrammar():
    engine = library("xgrammar")
    vocab, end = [bytes([byte]) for byte in range(256)] + [b"</s>"], 256
    tokenizer = engine.TokenizerInfo(vocab, stop_token_ids=[end])
    grammar = engine.GrammarCompiler(tokenizer).compile_regex(REGEX)
    mask = engine.allocate_token_bitmask(len(FOLLOWING), len(vocab))
    for row, text in enumerate(FOLLOWING):
        matcher = engine.GrammarMatcher(grammar)
        assert all(matcher.accept_token(token) for token in text.encode())
        matcher.fill_next_token_bitmask(mask, row)
    return mask, len(vocab), end


ENGINES = {"llguidance": _llguidance, "xgrammar": _xgrammar}


def bitmask(engine):
    """Returns the engine's bitmask for the prefixes, and the tokens that may follow as booleans [prefixes, vocab]."""
    mask, vocab, end = ENGINES[engine]()
    allowed = numpy.zeros((len(FOLLOWING), vocab), dtype=bool)
    for row, following in enumerate(FOLLOWING.values()):
        allowed[row, [end] if following is None else [*following.encode()]] = True
    return mask, allowed
