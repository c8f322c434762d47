"""Generation with the models of transformers 5: ``model.generate(..., custom_generate=flash_sampling.hf.generate)``."""

from __future__ import annotations

import operator
import weakref
from contextlib import nullcontext
from inspect import signature
from typing import Any

from ._lib import FlashSamplingError, Head, History, Sampler
from ._processors import Processors

__all__ = ["generate"]

# For each model: the description of its head, and its sampler.
_SAMPLERS: "weakref.WeakKeyDictionary[Any, tuple[Any, Sampler]]" = weakref.WeakKeyDictionary()
_OUTPUTS = ["output_attentions", "output_hidden_states", "output_scores", "output_logits"]


def generate(
    model: Any,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    seeds: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Draws tokens from the hidden states of a decoder, instead of its logits.

    Call it as ``model.generate(..., custom_generate=flash_sampling.hf.generate, seeds=[...])``; ``model.generate``
    passes the other arguments. Temperature, top_k, top_p, min_p, typical_p, epsilon_cutoff, repetition_penalty,
    sequence_bias, bad words and suppressed tokens, min_length, min_new_tokens and forced tokens become parameters of
    the sampler.

    seeds: a different seed for each returned sequence, from 0 to 2^64 - 1. None: seeds from torch's generator, so
        ``torch.manual_seed`` makes them reproducible. With greedy search (``do_sample=False``), seeds are an error.
    streamer: receives each token. transformers does not pass its streamer to a ``custom_generate``; pass it with
        ``functools.partial(generate, streamer=streamer)``.

    The position of a token is its index in its sequence, without padding. So a sequence has the same tokens alone and
    in a batch, if its hidden states are the same.

    Returns what ``model.generate`` returns: the sequences [rows, tokens], or a ``GenerateDecoderOnlyOutput`` with the
    sequences and the cache.

    Raises FlashSamplingError for a logits processor without a parameter of the sampler, for the outputs ``scores``,
    ``logits``, ``attentions`` and ``hidden_states``, for modes other than sampling and greedy search, and for a model
    whose logits differ from the logits of its output embedding.
    """
    import torch

    _refuse(model, input_ids, generation_config, synced_gpus, model_kwargs)
    rows, prompt = input_ids.shape
    base = model.base_model
    sampler = _sampler(model, rows)
    processors = Processors(logits_processor, generation_config.do_sample, sampler.vocab_size)
    seeds = _seeds(seeds, rows, generation_config.do_sample)
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        # No padding. `input_ids` may have only the tokens that the caller's cache lacks.
        mask = torch.ones((rows, getattr(generation_config, "_mask_length", None) or prompt), device=input_ids.device)
    positions = (mask != 0).sum(dim=1).tolist()
    histories = _histories(processors, input_ids, mask)
    pad = generation_config._pad_token_tensor if any(hasattr(c, "eos_token_id") for c in stopping_criteria) else None
    is_done = torch.zeros(rows, dtype=torch.bool, device=input_ids.device)
    device = model.get_output_embeddings().weight.device

    def inputs(**arguments):
        arguments = model.prepare_inputs_for_generation(input_ids, **arguments, **model_kwargs)
        return {name: value for name, value in arguments.items() if name != "logits_to_keep"} | {"return_dict": True}

    outputs = base(**inputs(next_sequence_length=_new_tokens(input_ids, mask, model_kwargs), is_first_iteration=True))
    forward = base
    if model._valid_auto_compile_criteria(model_kwargs, generation_config):
        forward = base.get_compiled_call(generation_config.compile_config)
    with getattr(model, "_optimize_model_for_decode", nullcontext)():
        while True:
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
            hidden = outputs.last_hidden_state[:, -1].to(device).contiguous()
            del outputs
            position = [first + input_ids.shape[1] - prompt for first in positions]
            params = processors.params(input_ids.shape[1])
            samples = sampler.sample(hidden, params, histories, seed=seeds, position=position)
            tokens = torch.tensor([sample.token for sample in samples], device=input_ids.device)
            if pad is not None:
                tokens = torch.where(is_done, pad.to(tokens.device), tokens)
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=1)
            for history, sample in zip(histories or [], samples):
                history.push(sample.token)
            if streamer is not None:
                streamer.put(tokens.cpu())
            is_done = is_done | stopping_criteria(input_ids, None)
            if is_done.all():
                break
            outputs = forward(**inputs(next_sequence_length=1 if model_kwargs["use_cache"] else None))
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return input_ids
    from transformers.generation import GenerateDecoderOnlyOutput

    caches = {name: model_kwargs[name] for name in ["cache", "past_key_values"] if name in model_kwargs}
    return GenerateDecoderOnlyOutput(sequences=input_ids, **caches)


def _invalid(knob, text):
    error = FlashSamplingError(text)
    error.knob = knob
    return error


def _refuse(model, input_ids, config, synced_gpus, model_kwargs):
    """Raises an error for models, modes and arguments that `generate` does not support."""
    import transformers

    kind = type(model).__name__
    # In the first versions of transformers 5, `prepare_inputs_for_generation` has other parameters.
    if "next_sequence_length" not in signature(transformers.GenerationMixin.prepare_inputs_for_generation).parameters:
        text = f"transformers {transformers.__version__} is not supported: a later version is needed"
        raise _invalid("transformers", text)
    if model.config.is_encoder_decoder or input_ids.dim() != 2 or model.base_model is model:
        raise _invalid("model", f"{kind} is not a decoder of one sequence of tokens with a head")
    mode = str(getattr(config.get_generation_mode(), "value", ""))
    if mode not in ("sample", "greedy_search"):
        raise _invalid("generation_config", f"the generation mode is {mode}, but must be sample or greedy_search")
    for name in _OUTPUTS:
        if config.return_dict_in_generate and getattr(config, name, None):
            raise _invalid(name, f"{name} is not supported")
    if getattr(config, "prefill_chunk_size", None) is not None:
        raise _invalid("prefill_chunk_size", "prefill_chunk_size is not supported")
    if model_kwargs.get("inputs_embeds") is not None:
        raise _invalid("inputs_embeds", "inputs_embeds is not supported: a prompt must have tokens")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        raise _invalid("attention_mask", f"attention_mask has shape {list(mask.shape)}, but must have two dimensions")
    if synced_gpus:
        raise _invalid("synced_gpus", "synced_gpus is not supported")


def _seeds(seeds, rows, do_sample):
    import torch

    if seeds is None:
        return torch.randint(2**63 - 1, (rows,)).tolist() if do_sample else list(range(rows))
    if not do_sample:
        raise _invalid("seeds", "seeds have no effect on greedy search: pass do_sample=True to sample")
    seeds = _integers(seeds)
    if len(seeds) != rows:
        raise _invalid("seeds", f"there are {len(seeds)} seeds for {rows} sequences")
    for row, seed in enumerate(seeds):
        if seed in seeds[:row]:
            error = _invalid("seeds", f"row {row}: seed {seed} is also the seed of row {seeds.index(seed)}")
            error.row = row
            raise error
    return seeds


def _integers(seeds):
    """The list of an integer, or of a sequence or tensor of integers."""
    try:
        return [operator.index(seeds)]
    except TypeError:
        pass
    try:
        if not isinstance(seeds, (set, frozenset, dict)):
            return [operator.index(seed) for seed in seeds]
    except TypeError:
        pass
    raise TypeError(f"seeds must be an integer, or a sequence or tensor of integers, not {seeds!r}")


def _histories(processors, input_ids, mask):
    """For each sequence, the tokens that the repetition penalty counts; None without a penalty."""
    if processors.repetition is None:
        return None
    mask = mask[:, -input_ids.shape[1] :]
    first = processors.first_penalized(len(input_ids))
    return [History(tokens[start:][kept[start:] != 0].tolist()) for tokens, kept, start in zip(input_ids, mask, first)]


def _new_tokens(input_ids, mask, model_kwargs):
    """The number of tokens that the caller's cache lacks; None: all."""
    cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    # A cache without layers, or of linear attention alone, has no length.
    if cache is None or all(getattr(cache, "is_linear", [False])) or mask.shape[1] != input_ids.shape[1]:
        return None
    return input_ids.shape[1] - int(cache.get_seq_length())


def _sampler(model, rows):
    """The sampler over the output embedding; an earlier call's sampler if the head is the same."""
    output, config = model.get_output_embeddings(), model.config.get_text_config()
    weight, bias = getattr(output, "weight", None), getattr(output, "bias", None)
    if not hasattr(weight, "detach"):
        text = f"the output embedding of {type(model).__name__} is a {type(output).__name__} without a tensor weight"
        raise _invalid("model", text)
    weight = weight.detach()
    soft_cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    described = (weight.data_ptr(), weight.shape, weight.dtype, weight.device, soft_cap, scale)
    # The sampler copies a bias on the CPU, so the description also has the version of the bias.
    described += () if bias is None else (bias.data_ptr(), bias._version)
    known, sampler = _SAMPLERS.get(model, (None, None))
    if known == described and sampler.max_rows >= rows:
        return sampler
    bias = None if bias is None else bias.detach().float()
    if known != described:
        _check_head(model, weight, bias, soft_cap, scale)
    head = Head(weight, bias, soft_cap=soft_cap, scale=scale)
    # Powers of two, so that batches of similar sizes share a sampler.
    sampler = Sampler(head, max(16, 1 << (rows - 1).bit_length()))
    _SAMPLERS[model] = described, sampler
    return sampler


def _check_head(model, weight, bias, soft_cap, scale):
    """Compares the head's logits with the model's after one token, because a model's code may change its logits."""
    import torch

    token = torch.ones((1, 1), dtype=torch.int64, device=model.device)
    token = {"input_ids": token, "use_cache": False, "return_dict": True}
    with torch.no_grad():
        logits = model(**token).logits[0, -1].float()
        hidden = model.base_model(**token).last_hidden_state[0, -1].to(weight.device)
        ours = torch.nn.functional.linear(hidden, weight).float()
    ours = ours if bias is None else ours + bias
    ours = (ours if soft_cap is None else soft_cap * torch.tanh(ours / soft_cap)) * scale
    # A model in bfloat16 or float16 rounds its logits.
    tolerance = 1e-4 + 2.5 * torch.finfo(weight.dtype).eps
    if ours.shape != logits.shape or (ours - logits.to(ours.device)).abs().max() > tolerance * logits.abs().max():
        raise _invalid("model", f"the logits of {type(model).__name__} are not those of its output embedding")
