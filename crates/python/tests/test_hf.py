"""The hook of transformers: tokens are the argmax of processed logits plus noise, in any batch; the rest is refused."""

import functools
import json
import subprocess
from pathlib import Path

import numpy
import pytest
from conftest import library
from test_package import run, scripts

import flash_sampling
from flash_sampling import FlashSamplingError, Head, Sampler, SamplingParams

torch = library("torch")
transformers = library("transformers")
# The models are small, so threads only wait for each other.
torch.set_num_threads(1)

SIZES = dict(
    vocab_size=200, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
# The family, and what its logits need. The transforms are strong enough to change tokens.
MODELS = {
    "Llama": {"tie_word_embeddings": False},
    "Qwen3": {"tie_word_embeddings": True},
    "Gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 4.0},
}
PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [3]]
SEEDS = [2**64 - 1, 7, 8]


def make(family, **changes):
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **MODELS[family], **changes})
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (0.2 if parameter.dim() == 2 else 0.1) + (parameter.dim() == 1)
    return model


@pytest.fixture(params=MODELS)
def model(request):
    return make(request.param)


@pytest.fixture
def llama():
    return make("Llama")


def batch(prompts):
    """Prompts with padding on the left."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def generate(model, prompts=PROMPTS, hook=None, **arguments):
    """The whole result of a call with the hook."""
    # The default top_k of transformers is 50.
    arguments = {"do_sample": True, "max_new_tokens": 12, "top_k": 0, **arguments}
    if arguments["do_sample"]:
        arguments.setdefault("seeds", SEEDS[: len(prompts)])
    from flash_sampling import hf

    return model.generate(**batch(prompts), custom_generate=hook or hf.generate, **arguments)


def drawn(model, prompts=PROMPTS, **arguments):
    """The drawn tokens of each sequence."""
    sequences = generate(model, prompts, **arguments)
    return sequences[:, max(map(len, prompts)) :].tolist()


def definition(model, input_ids, logits_processor, stopping_criteria, generation_config, seeds=None, **model_kwargs):
    """The definition: the argmax of what transformers makes of the model's logits, plus noise, without a cache."""
    mask = model_kwargs["attention_mask"]
    mask = torch.ones_like(input_ids) if mask is None else mask
    position, done = mask.sum(1).tolist(), torch.zeros(len(input_ids), dtype=torch.bool)
    while not done.all():
        place = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=input_ids, attention_mask=mask, position_ids=place).logits[:, -1].float()
        scores = logits_processor(input_ids, logits)
        if generation_config.do_sample:
            noise = [flash_sampling.noise(s, p, 0, range(scores.shape[1])) for s, p in zip(seeds, position)]
            scores = scores + torch.stack([torch.as_tensor(row) for row in noise])
        tokens = torch.where(done, generation_config._pad_token_tensor, scores.argmax(1))
        input_ids = torch.cat([input_ids, tokens[:, None]], 1)
        mask, position = torch.cat([mask, torch.ones_like(tokens)[:, None]], 1), [p + 1 for p in position]
        done = done | stopping_criteria(input_ids, None)
    return input_ids


def test_tokens_are_the_argmax_of_the_models_logits_plus_noise(model):
    assert drawn(model) == drawn(model, hook=definition)
    assert drawn(model, do_sample=False) == drawn(model, hook=definition, do_sample=False)


def test_a_sequence_has_the_same_tokens_alone_and_in_a_batch(model):
    in_batch = drawn(model, eos_token_id=None, temperature=0.8, top_p=0.9, repetition_penalty=1.3)
    assert len({tuple(tokens) for tokens in in_batch}) == 3
    for prompt, seed, tokens in zip(PROMPTS, SEEDS, in_batch):
        alone = drawn(model, [prompt], seeds=[seed], eos_token_id=None, temperature=0.8, top_p=0.9, repetition_penalty=1.3)
        assert alone == [tokens]


def test_tokens_are_those_of_a_sampler_over_hidden_states(llama):
    """One step at a time, with the model's body and the weight of its head."""
    sampler, sequence = Sampler(Head(llama.lm_head.weight.detach())), list(PROMPTS[0])
    [want] = drawn(llama, PROMPTS[:1], eos_token_id=None, temperature=0.7)
    for token in want:
        with torch.no_grad():
            hidden = llama.model(torch.tensor([sequence])).last_hidden_state[:, -1]
        [sample] = sampler.sample(hidden, SamplingParams(temperature=0.7), seed=SEEDS[0], position=len(sequence))
        assert sample.token == token
        sequence.append(token)


# The last argument is the processor; the others make its effect likely.
PROCESSORS = [
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"typical_p": 0.5},
    {"epsilon_cutoff": 0.01},
    {"temperature": 1.5, "top_k": 40, "typical_p": 0.9, "epsilon_cutoff": 0.003, "min_p": 0.05, "top_p": 0.7},
    {"renormalize_logits": True, "top_p": 0.6},
    {"temperature": 0.3, "repetition_penalty": 3.0},
    {"sequence_bias": {(20,): 6.0, (21,): -4.0}},
    {"sequence_bias": {(20,): 6.0, (21,): 6.0}, "repetition_penalty": 3.0},
    {"bad_words_ids": [[token] for token in range(100)]},
    {"suppress_tokens": list(range(100, 300))},
    {"begin_suppress_tokens": list(range(100))},
    {"sequence_bias": {(2,): 6.0}, "min_length": 12},
    {"sequence_bias": {(2,): 6.0}, "min_new_tokens": 5},
    {"forced_eos_token_id": 77},
    {"forced_bos_token_id": 77},
]


FILTERS = {"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff"}
GREEDY = [{"do_sample": False, **arguments} for arguments in PROCESSORS if list(arguments)[-1] not in FILTERS]


@pytest.mark.parametrize("arguments", PROCESSORS + GREEDY, ids=lambda arguments: " ".join(arguments))
def test_processors_of_transformers_become_parameters(llama, arguments):
    last = list(arguments)[-1]
    arguments = {"temperature": 1.0, **arguments}
    # A first token is forced after one token.
    prompts = PROMPTS[2:] if last == "forced_bos_token_id" else PROMPTS
    tokens = drawn(llama, prompts, **arguments)
    assert tokens == drawn(llama, prompts, hook=definition, **arguments)
    del arguments[last]
    assert tokens != drawn(llama, prompts, **arguments), "the processor changes nothing"


class OfTheUser(transformers.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


REFUSED = {
    "EtaLogitsWarper has no parameter": {"eta_cutoff": 0.1},
    "TopHLogitsWarper has no parameter": {"top_h": 0.5},
    "NoRepeatNGramLogitsProcessor has no parameter": {"no_repeat_ngram_size": 2},
    "InfNanRemoveLogitsProcessor has no parameter": {"remove_invalid_values": True},
    "ExponentialDecayLengthPenalty has no parameter": {"exponential_decay_length_penalty": (2, 1.5)},
    "PrefixConstrainedLogitsProcessor has no parameter": {"prefix_allowed_tokens_fn": lambda row, tokens: [1]},
    "OfTheUser is not a processor": {"logits_processor": [OfTheUser()]},
    "NoBadWordsLogitsProcessor has a sequence of several": {"bad_words_ids": [[3], [4, 5]]},
    "TemperatureLogitsWarper is not in the sampler's order": {
        "temperature": 0.5,
        "logits_processor": [transformers.TopKLogitsWarper(5)],
    },
    "TopKLogitsWarper has min_tokens_to_keep": {
        "logits_processor": [transformers.TopKLogitsWarper(5, min_tokens_to_keep=2)],
    },
    "ForcedEOSTokenLogitsProcessor forces 2 tokens": {"forced_eos_token_id": [4, 5]},
    "the generation mode is beam_sample": {"num_beams": 2},
    "output_scores is not supported": {"return_dict_in_generate": True, "output_scores": True},
    "prefill_chunk_size is not supported": {"prefill_chunk_size": 2},
    "seeds have no effect on greedy search: pass do_sample=True": {"do_sample": False, "seeds": SEEDS},
    "there are 2 seeds for 3 sequences": {"seeds": [1, 2]},
    "row 2: seed 1 is also the seed of row 0": {"seeds": [1, 2, 1]},
}


@pytest.mark.parametrize("text", REFUSED)
def test_the_rest_is_refused_by_name(llama, text):
    with pytest.raises(FlashSamplingError, match=text) as error:
        generate(llama, **REFUSED[text])
    assert error.value.knob


def test_seeds_are_integers_of_any_library(llama):
    want = drawn(llama, PROMPTS[:1], seeds=[3])
    for seeds in [3, numpy.int64(3), torch.tensor(3), torch.tensor([3]), numpy.array([3]), (numpy.uint64(3),)]:
        assert drawn(llama, PROMPTS[:1], seeds=seeds) == want
    for seeds in [{3}, {3: 4}, 3.0, [3.0], "3"]:
        with pytest.raises(TypeError, match="seeds must be an integer, or a sequence"):
            drawn(llama, PROMPTS[:1], seeds=seeds)


class OfMethods(torch.nn.Linear):
    """The output embedding of a quantised model: its weight is a method."""

    weight = bias = lambda self: None


@pytest.mark.parametrize("wrap", [torch.nn.Sequential, lambda head: OfMethods.__new__(OfMethods)])
def test_an_output_embedding_without_a_tensor_is_refused(llama, wrap):
    llama.get_output_embeddings = lambda: wrap(llama.lm_head)
    match = "the output embedding of LlamaForCausalLM is a (Sequential|OfMethods) without a tensor weight"
    with pytest.raises(FlashSamplingError, match=match) as error:
        generate(llama)
    assert error.value.knob == "model"


def test_a_model_with_other_logits_is_refused():
    class Louder(transformers.LlamaForCausalLM):
        def forward(self, *arguments, **named):
            outputs = super().forward(*arguments, **named)
            outputs.logits = outputs.logits * 1.1
            return outputs

    config = make("Llama").config
    with pytest.raises(FlashSamplingError, match="the logits of Louder are not those of its output embedding"):
        generate(Louder(config).eval())


def test_without_seeds_torchs_generator_repeats_the_tokens(llama):
    def tokens(seed):
        torch.manual_seed(seed)
        return drawn(llama, seeds=None)

    assert tokens(1) == tokens(1) != tokens(2)


def test_sequences_of_one_prompt_have_a_seed_each(llama):
    tokens = drawn(llama, PROMPTS[:1], eos_token_id=None, num_return_sequences=3, seeds=SEEDS)
    assert tokens == [drawn(llama, PROMPTS[:1], eos_token_id=None, seeds=[seed])[0] for seed in SEEDS]


def test_a_finished_sequence_gets_padding(llama):
    tokens = drawn(llama, sequence_bias={(2,): 3.0}, max_new_tokens=40)
    assert tokens == drawn(llama, hook=definition, sequence_bias={(2,): 3.0}, max_new_tokens=40)
    ends = [row.index(2) for row in tokens]
    assert len(set(ends)) > 1 and max(ends) == len(tokens[0]) - 1
    assert all(token == 0 for row, end in zip(tokens, ends) for token in row[end + 1 :])


def test_a_streamer_gets_the_prompt_and_each_token(llama):
    from flash_sampling import hf

    class Recorder:
        parts, is_ended = [], False

        def put(self, tokens):
            self.parts += tokens.flatten().tolist()

        def end(self):
            self.is_ended = True

    streamer = Recorder()
    tokens = generate(llama, PROMPTS[:1], hook=functools.partial(hf.generate, streamer=streamer), streamer=streamer)
    assert streamer.parts == tokens[0].tolist() and streamer.is_ended


@pytest.mark.parametrize("arguments", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_the_kind_of_cache_changes_no_token(llama, arguments):
    assert drawn(llama, **arguments) == drawn(llama)


def test_a_cache_is_continued(llama):
    whole = generate(llama, PROMPTS[:1], eos_token_id=None, max_new_tokens=12)
    first = generate(llama, PROMPTS[:1], eos_token_id=None, max_new_tokens=5, return_dict_in_generate=True)
    assert torch.equal(first.sequences, whole[:, :-7])
    cache = "cache" if "cache" in first else "past_key_values"
    rest = generate(llama, first.sequences.tolist(), eos_token_id=None, max_new_tokens=7, **{cache: first[cache]})
    assert torch.equal(rest, whole)


def test_a_model_in_bfloat16_has_the_tokens_of_its_hidden_states(llama):
    llama.to(torch.bfloat16)
    sampler = Sampler(Head(llama.lm_head.weight.detach()))
    [[token]] = drawn(llama, PROMPTS[:1], max_new_tokens=1)
    with torch.no_grad():
        hidden = llama.model(torch.tensor(PROMPTS[:1])).last_hidden_state[:, -1]
    assert sampler(hidden, seed=SEEDS[0], position=5).tolist() == [token]


def test_a_changed_weight_is_used(llama):
    before = drawn(llama)
    with torch.no_grad():
        llama.lm_head.weight += torch.randn_like(llama.lm_head.weight)
    after = drawn(llama)
    assert before != after == drawn(llama, hook=definition)


def test_the_script_of_the_readme_runs(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])
    assert run(scripts()[3]).startswith("['Once upon")


CHECKPOINTS = Path(__file__).parents[3] / "crates/cli/tests/checkpoints"


def generated(command, folder, prompt, *flags):
    """The sequences that the command generates."""
    arguments = [command, "generate", "--model", folder, "--prompt", prompt, "--format", "json", *flags]
    output = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def test_tokens_are_those_of_the_command(command):
    """On the stories model, whose layers run in float32 here and there."""
    folder = Path(__file__).parents[3] / "crates/cli/models/stories"
    flags = "--max-tokens 40 --seed 3 -n 3 --temperature 0.9 --top-p 0.95".split()
    rows = generated(command, folder, "Once upon", *flags)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    settings = {"temperature": 0.9, "top_p": 0.95, "max_new_tokens": 40, "seeds": [3, 4, 5], "pad_token_id": 0}
    prompts = [row["prompt_tokens"] for row in rows]
    for row, tokens in zip(rows, drawn(model, prompts, **settings)):
        assert tokens[: len(row["tokens"])] == row["tokens"]
        assert len(row["tokens"]) > 10


# The tied head of Qwen3 repeats a token at lower temperatures.
@pytest.mark.parametrize("family, temperature", [("llama", 0.8), ("qwen3", 4.0), ("gemma2", 0.8)])
def test_each_family_has_the_tokens_of_the_command_alone_and_in_a_batch(command, family, temperature):
    """On random models, for prompts of three lengths."""
    # The other implementations of attention may lack the cap of scores.
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINTS / family, **options).eval()
    texts, seeds = ["The fox", "42", "One cold morning, a"], [3, 2**64 - 1, 5]
    flags = f"--max-tokens 20 --temperature {temperature} --top-p 0.95".split()
    given = [(text, *flags, "--seed", str(seed)) for text, seed in zip(texts, seeds)]
    rows = [generated(command, CHECKPOINTS / family, *each)[0] for each in given]
    prompts, want = [row["prompt_tokens"] for row in rows], [row["tokens"] for row in rows]
    assert len({len(prompt) for prompt in prompts}) == 3 and min(len({*tokens}) for tokens in want) > 10
    settings = {"temperature": temperature, "top_p": 0.95, "max_new_tokens": 20, "pad_token_id": 0}
    together = drawn(model, prompts, seeds=seeds, **settings)
    for prompt, seed, tokens, in_batch in zip(prompts, seeds, want, together):
        [alone] = drawn(model, [prompt], seeds=[seed], **settings)
        assert alone[: len(tokens)] == in_batch[: len(tokens)] == tokens
        # The negative control: another seed.
        assert drawn(model, [prompt], seeds=[seed - 1], **settings)[0] != alone
