"""Draws with the package flash_sampling for a test in Rust. Requests come from stdin, and replies go to stdout.

A request is the length of a JSON text, the length of bytes (each 8 bytes), the text, and the bytes. A reply has the same
form; its bytes are float64 numbers, which hold every token and float32 exactly.
"""

import array
import functools
import json
import os
import sys

import numpy

from flash_sampling import FlashSamplingError, Head, History, Sampler, SamplingParams

DEVICE = sys.argv[1]
TYPES = {"bf16": numpy.uint16, "f16": numpy.float16, "f32": numpy.float32}
COLUMNS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
samplers = {}

if DEVICE != "cpu":
    import torch

    if not torch.cuda.is_available():
        sys.exit("torch has no GPU")


def matrix(given, memory):
    """A matrix in the given layout: rows, columns, elements from row to row, and the address modulo 64."""
    rows, cols, stride, offset = given["layout"]
    dtype = numpy.dtype(TYPES[given["type"]])
    room = numpy.empty(len(memory) + 128, numpy.uint8)
    if DEVICE != "cpu":
        # torch's tensors begin at an element.
        first = offset // dtype.itemsize
        room = room[: room.size // 8 * 8]
        room[first * dtype.itemsize :][: len(memory)] = numpy.frombuffer(memory, numpy.uint8)
        kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[given["type"]]
        return torch.from_numpy(room).to(DEVICE).view(kind).as_strided((rows, cols), (stride, 1), first)
    first = -room.ctypes.data % 64 + offset
    room[first:][: len(memory)] = numpy.frombuffer(memory, numpy.uint8)
    return numpy.ndarray((rows, cols), dtype, room, first, (stride * dtype.itemsize, dtype.itemsize))


def build(given, memory):
    """Makes a sampler: a head and a plan."""
    weight, bias = memory[: given["weight_bytes"]], None
    if given["has_bias"]:
        bias = numpy.frombuffer(memory[len(weight) :], numpy.float32)
        bias = bias if DEVICE == "cpu" else torch.from_numpy(bias.copy()).to(DEVICE)
    head = Head(matrix(given["weight"], weight), bias, **given["head"])
    sampler = Sampler(head, given["max_rows"], **given["options"])
    samplers[given["sampler"]] = sampler
    return {"backend": sampler.backend, "is_pathwise": sampler.is_pathwise}, []


def knob_and_text(error):
    return [error.knob, str(error)]


@functools.lru_cache(4096)
def checked(params):
    """The parameters of a row, or their error."""
    try:
        return SamplingParams(**json.loads(params))
    except FlashSamplingError as error:
        return error


def sample(given, memory):
    """Draws. A row whose parameters are refused has their error, and the other rows are drawn without it."""
    sampler, hidden, rows = samplers[given["sampler"]], matrix(given["hidden"], memory), given["rows"]
    names = ("seed", "position", "first_draw")
    options = {name: numpy.array([row[name] for row in rows], numpy.uint64) for name in names}
    params, errors = [checked(row["params"]) for row in rows], {}
    histories = [History(*row["history"]) for row in rows]
    if any(row["mask"] is not None for row in rows):
        words = -(-sampler.vocab_size // 32)
        masks = [[2**32 - 1] * words if row["mask"] is None else (row["mask"] + [0] * words)[:words] for row in rows]
        options["mask"] = numpy.array(masks, numpy.uint32)
    while True:
        for at, row in enumerate(params):
            if isinstance(row, FlashSamplingError):
                errors[at], params[at] = row, SamplingParams()
        try:
            results = sampler.sample(hidden, params, histories, **options)
        except FlashSamplingError as error:
            results = error.results
            if error.errors is not None:
                errors = error.errors | errors
            elif error.row is not None:
                params[error.row] = error
                continue
            else:
                return {"error": str(error)}, []
        results = [None if at in errors else row for at, row in enumerate(results)]
        compare_with_call(sampler, hidden, rows, options, results)
        return {"errors": {at: knob_and_text(error) for at, error in errors.items()}}, numbers(results)


def compare_with_call(sampler, hidden, rows, options, results):
    """Draws the tokens of simple rows again, by the call that returns tokens alone."""
    params = [json.loads(row["params"]) for row in rows] if len(rows) < 64 else [{"n": 2}]
    if any(row.keys() - COLUMNS for row in params) or options["first_draw"].any():
        return
    columns = {name: [float(row.get(name, off)) for row in params] for name, off in COLUMNS.items()}
    columns["top_k"] = [int(value) for value in columns["top_k"]]
    arguments = {name: value for name, value in (options | columns).items() if name != "first_draw"}
    try:
        tokens = sampler(hidden, **arguments)
    except FlashSamplingError as error:
        if error.results is None:
            return  # An invalid value fails the whole call.
        tokens = error.results
    assert [int(token) for token in tokens] == [-1 if row is None else row.token for row in results]


def numbers(results):
    """The results of all rows, as Rust's adapter reads them."""
    out = []
    for row in results:
        if row is None:
            continue
        out.append(len(row.draws))
        for draw in row.draws:
            out += (draw.token, draw.score, draw.logit)
        lists = [[], []]
        if row.draws[0].raw_logit is not None:
            lists[0] = [draw.raw_logit for draw in row.draws]
        if row.draws[0].rank is not None:
            lists[1] = [draw.rank for draw in row.draws]
        lists += [[part for pair in pairs for part in pair] for pairs in (row.top_logits, row.token_logits)]
        lists += [[] if row.log_z is None else [row.log_z]]
        lists += [[] if row.kept is None else [row.kept.log_mass, *row.kept.token_ids], [row.passes]]
        for each in lists:
            out += (len(each), *each)
    return out


def drop(given, memory):
    del samplers[given["sampler"]]
    return {}, []


def main():
    # The package may print, but not into the replies.
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    reply = {}, []
    while True:
        text, values = json.dumps(reply[0]).encode(), array.array("d", reply[1]).tobytes()
        stdout.write(len(text).to_bytes(8, "little") + len(values).to_bytes(8, "little") + text + values)
        stdout.flush()
        head = stdin.read(16)
        if not head:
            break
        given = json.loads(stdin.read(int.from_bytes(head[:8], "little")))
        memory = stdin.read(int.from_bytes(head[8:], "little"))
        try:
            reply = {"build": build, "sample": sample, "drop": drop}[given["call"]](given, memory)
        except FlashSamplingError as error:
            reply = {"error": str(error)}, []


main()
