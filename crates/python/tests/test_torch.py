"""The operator of torch: its schema holds, and torch.compile keeps it as one node."""

import numpy
import pytest
from conftest import library

from flash_sampling import FlashSamplingError, Head, Sampler

torch = library("torch")


@pytest.fixture
def inputs(problem):
    seed, position = torch.tensor(problem.seeds), torch.tensor(problem.positions)
    return {"hidden": torch.from_numpy(problem.hidden), "seed": seed, "position": position}


def operator(problem):
    from flash_sampling.torch import operator

    return operator(Sampler(Head(torch.from_numpy(problem.weight))))


def test_it_draws_as_the_sampler(problem, inputs):
    draw = operator(problem)
    assert numpy.array_equal(draw(**inputs), problem.argmax_with_noise())
    temperature, top_k = torch.full((4,), 0.5), torch.tensor([0, 1, 2, 3])
    want = draw.sampler(inputs["hidden"], **problem.keys, temperature=0.5, top_k=[0, 1, 2, 3])
    assert torch.equal(draw(**inputs, temperature=temperature, top_k=top_k), want)


def test_torch_compile_keeps_it_as_one_node(problem, inputs):
    draw = operator(problem)

    def step(hidden, seed, position):
        return draw(hidden * 1.0, seed=seed, position=position + 0) + 0

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    assert numpy.array_equal(compiled(**inputs), problem.argmax_with_noise())
    rows = {name: values[:3] for name, values in inputs.items()}
    assert numpy.array_equal(compiled(**rows), problem.argmax_with_noise()[:3])


def test_torch_checks_its_schema_and_fake(problem, inputs):
    draw = operator(problem)
    number = draw.__closure__[[name for name in draw.__code__.co_freevars].index("number")].cell_contents
    arguments = (inputs["hidden"], number, inputs["seed"], inputs["position"])
    torch.library.opcheck(torch.ops.flash_sampling.sample, arguments)


def test_errors_pass_through(problem, inputs):
    with pytest.raises(FlashSamplingError, match="row 1: top_p is 0") as error:
        operator(problem)(**inputs, top_p=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert error.value.row == 1


def test_log_probabilities_of_given_tokens(problem):
    from flash_sampling.torch import token_logprobs

    sampler = Sampler(Head(torch.from_numpy(problem.weight)), max_rows=3, max_logprobs=0)
    tokens = torch.tensor([[5, 6], [999, 0], [7, 7], [400, 401]])
    want = torch.log_softmax(torch.from_numpy(problem.logits), 1).gather(1, tokens)
    assert torch.allclose(token_logprobs(sampler, torch.from_numpy(problem.hidden), tokens), want, atol=1e-5)
    for wrong in [tokens[0], tokens[:2], tokens.float()]:
        with pytest.raises(FlashSamplingError, match=r"tokens has shape .* must be \[4, n\] int64") as error:
            token_logprobs(sampler, torch.from_numpy(problem.hidden), wrong)
        assert error.value.knob == "tokens"
