//! The sampler over tensors.

use crate::column::{Column, floats, integers};
use crate::cuda::OnDevice;
use crate::error::{failed, invalid, invalid_in_row, of_rows};
use crate::head::{Head, Owner};
use crate::history::History;
use crate::params::SamplingParams;
use crate::result::{RowSample, deliver};
use crate::tensor::{Place, Tensor, in_host_memory};
use core::fmt::Display;
use core::str::FromStr;
use flash_sampling::{
    Backend, BackendConfig, Exactness, PerturbedArgmax, Plan, RowError, RowParams, SampleError, Samples, VariantConfig,
    build_from_logits, build_owned,
};
use pyo3::prelude::*;
use pyo3::types::PyList;
use std::sync::{Mutex, PoisonError};

/// A sampler of the facade, or of tensors on a GPU.
enum Inner {
    Host(Box<dyn PerturbedArgmax>),
    Device(Box<OnDevice>),
}

impl Inner {
    fn sample(
        &mut self,
        input: &Tensor,
        what: &'static str,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> PyResult<()> {
        let of_call = |error: SampleError| match error {
            SampleError::Hidden { .. } => invalid(what, error.to_string()),
            SampleError::TooManyRows { rows, max_rows } => {
                invalid("max_rows", format!("{what} has {rows} rows, but the sampler has max_rows={max_rows}"))
            }
            error => failed(&error),
        };
        match self {
            Inner::Host(sampler) => sampler.sample(input.matrix(what)?, rows, out).map_err(of_call),
            Inner::Device(sampler) => sampler.sample(input, what, rows, out)?.map_err(of_call),
        }
    }
}

/// Draws tokens for rows of hidden states, or of logits (`Sampler.for_logits`).
///
/// Noise is a pure function of (seed, position, draw, token). So a row's token does not depend on the other rows of the
/// batch, on threads or on tiles. Calls release the GIL; calls of one sampler wait for each other.
///
/// head: the LM head. Its memory is the sampler's: hidden states must be on the same device.
/// max_rows: the largest number of rows of a call.
/// variant: "tiled", "grouped:SIZE", "grouped:SIZE:reuse", "online:SIZE", "sharded:SHARDS" or "sharded:SHARDS:log-mass".
/// max_draws: the largest `n` of a row.
/// max_logprobs: the largest `logprobs` of a row; None: no row requests log-probabilities.
/// threads: the number of threads; None: all cores, in one pool of the process. (CPU)
/// backend: for a head on the CPU: "cpu", "cpu:ISA", "reference" (float64, slow), or "cuda:GPU", which copies the weight;
///     None: the backend of the head's memory.
/// canonical: draw the same tokens on every instruction set and backend; refuses filters. (CPU)
#[pyclass(frozen, weakref, module = "flash_sampling")]
pub(crate) struct Sampler {
    state: Mutex<(Inner, Samples)>,
    plan: Plan,
    vocab_size: u32,
    place: Place,
    backend: &'static str,
    exactness: Exactness,
    /// The name of the input.
    input: &'static str,
}

/// The configuration of a sampler from its arguments.
struct Options<'a> {
    max_rows: usize,
    variant: &'a str,
    max_draws: u32,
    max_logprobs: Option<u32>,
    threads: Option<usize>,
    backend: Option<&'a str>,
    canonical: bool,
}

impl Options<'_> {
    fn config(&self) -> PyResult<BackendConfig> {
        let mut backend: Backend = parse("backend", self.backend.unwrap_or("cpu"))?;
        match (&mut backend, self.threads) {
            (_, None) => {}
            (Backend::Cpu(options), threads) => options.threads = threads,
            _ => return Err(invalid("threads", "threads must be None with a backend other than the CPU")),
        }
        let &Options { max_rows, max_draws, max_logprobs, canonical, .. } = self;
        let plan = Plan { max_rows, max_draws, max_logprobs, canonical };
        Ok(BackendConfig { backend, variant: parse("variant", self.variant)?, plan })
    }
}

fn parse<T: FromStr<Err: Display>>(knob: &str, text: &str) -> PyResult<T> {
    text.parse().map_err(|error: T::Err| invalid(knob, error.to_string()))
}

/// Loads NVIDIA's run-time compiler if it is in a package of Python.
fn preload(py: Python<'_>) -> PyResult<()> {
    py.import("flash_sampling._nvidia")?.call_method0("preload").map(drop)
}

fn preload_for(py: Python<'_>, config: &BackendConfig) -> PyResult<()> {
    if matches!(config.backend, Backend::Cuda { .. }) { preload(py) } else { Ok(()) }
}

impl Sampler {
    fn host(sampler: Box<dyn PerturbedArgmax>, input: &'static str) -> Sampler {
        let (can, plan, vocab_size) = (sampler.capabilities(), sampler.plan(), sampler.shape().vocab_size);
        let state = Mutex::new((Inner::Host(sampler), Samples::new()));
        let (backend, exactness) = (can.backend, can.exactness);
        Sampler { state, plan, vocab_size, place: Place::Host, backend, exactness, input }
    }

    fn device(py: Python<'_>, head: &Head, config: &BackendConfig) -> PyResult<Sampler> {
        if config.variant != VariantConfig::Tiled {
            return Err(invalid("variant", format!("variant is {}, but a head on a GPU needs tiled", config.variant)));
        }
        preload(py)?;
        let parts = head.parts.clone();
        let sampler = py.detach(|| OnDevice::new(parts, config.plan))?;
        let (can, plan, vocab_size) = (sampler.capabilities(), sampler.plan(), sampler.vocab_size());
        let (place, backend, exactness) = (head.parts.weight.place(), can.backend, can.exactness);
        let state = Mutex::new((Inner::Device(Box::new(sampler)), Samples::new()));
        Ok(Sampler { state, plan, vocab_size, place, backend, exactness, input: "hidden" })
    }

    /// Borrows the input `[rows, cols]` of a call. The result has the number of rows.
    fn borrow(&self, input: &Bound<'_, PyAny>) -> PyResult<(Tensor, usize)> {
        let tensor = Tensor::borrow(input, self.input)?;
        let rows = tensor.layout(self.input)?.rows;
        if tensor.place() != self.place {
            let text = format!("{} is on {}, but the sampler is on {}", self.input, tensor.place(), self.place);
            return Err(invalid(self.input, text));
        }
        Ok((tensor, rows))
    }

    /// Draws without the GIL, and converts the results by `convert`.
    fn draw<'a, R: Send>(
        &self,
        input: &Tensor,
        rows: impl IntoIterator<Item = RowParams<'a>>,
        convert: impl FnOnce(&Samples) -> R,
    ) -> PyResult<R> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (inner, samples) = &mut *state;
        let rows: Vec<RowParams<'_>> = rows.into_iter().collect();
        inner.sample(input, self.input, &rows, samples)?;
        Ok(convert(samples))
    }

    /// The words of a mask per row, and the words of all rows; one row if the rows share it.
    fn mask(&self, mask: &Bound<'_, PyAny>, rows: usize) -> PyResult<(usize, Vec<u32>)> {
        let mask = Tensor::borrow(&in_host_memory(mask)?, "mask")?;
        let (words, bitmap) = mask.bitmap("mask")?;
        let needed = self.vocab_size.div_ceil(32) as usize;
        let is_shared = mask.shape().len() == 1 || mask.shape()[0] == 1;
        if words < needed || (!is_shared && mask.shape()[0] != rows) {
            let shape = mask.shape();
            return Err(invalid(
                "mask",
                format!("mask has shape {shape:?}, but must be [{rows}, {needed}] or [{needed}]"),
            ));
        }
        Ok((words, bitmap))
    }
}

/// Refuses one seed and one position for several rows, which would have equal noise.
fn check_noise(
    rows: usize,
    seeds: &Column<Option<u64>>,
    positions: &Column<Option<u64>>,
    greedy: bool,
) -> PyResult<()> {
    match (seeds, positions) {
        (Column::Same(_), Column::Same(_)) if rows > 1 && !greedy => {
            let fault = "one seed and one position would give all rows the same noise";
            Err(invalid("seed", format!("{fault}: give one seed, or one position, for each of {rows} rows")))
        }
        _ => Ok(()),
    }
}

/// A column of seeds or positions.
fn noise_key(object: Option<&Bound<'_, PyAny>>, name: &str, rows: usize, range: &str) -> PyResult<Column<Option<u64>>> {
    Ok(match object {
        None => Column::Same(None),
        Some(object) => match integers(object, name, rows, range)? {
            Column::Same(value) => Column::Same(Some(value)),
            Column::Each(values) => Column::Each(values.into_iter().map(Some).collect()),
        },
    })
}

const SEEDS: &str = "0 to 2^64 - 1";
const POSITIONS: &str = "0 to 2^56 - 1";

#[pymethods]
impl Sampler {
    #[new]
    #[pyo3(signature = (head, max_rows=256, *, variant="tiled", max_draws=1, max_logprobs=None, threads=None,
        backend=None, canonical=false))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        head: &Bound<'_, Head>,
        max_rows: usize,
        variant: &str,
        max_draws: u32,
        max_logprobs: Option<u32>,
        threads: Option<usize>,
        backend: Option<&str>,
        canonical: bool,
    ) -> PyResult<Sampler> {
        let head = head.get();
        let config = Options { max_rows, variant, max_draws, max_logprobs, threads, backend, canonical }.config()?;
        match head.parts.weight.place() {
            Place::Host => {
                preload_for(py, &config)?;
                let owner = Owner(head.parts.clone());
                let sampler = py.detach(|| build_owned(owner, &config)).map_err(|error| failed(&error))?;
                Ok(Sampler::host(sampler, "hidden"))
            }
            place if backend.is_some() || threads.is_some() => {
                let knob = if backend.is_some() { "backend" } else { "threads" };
                Err(invalid(knob, format!("{knob} must be None for a head on {place}")))
            }
            Place::Cuda(_) => Sampler::device(py, head, &config),
        }
    }

    /// A sampler of existing logits [rows, vocab_size] in bfloat16, float16 or float32, in memory of the CPU. The
    /// arguments are the class's.
    #[staticmethod]
    #[pyo3(signature = (vocab_size, max_rows=256, *, max_draws=1, max_logprobs=None, threads=None, backend=None))]
    fn for_logits(
        py: Python<'_>,
        vocab_size: usize,
        max_rows: usize,
        max_draws: u32,
        max_logprobs: Option<u32>,
        threads: Option<usize>,
        backend: Option<&str>,
    ) -> PyResult<Sampler> {
        let (variant, canonical) = ("tiled", false);
        let config = Options { max_rows, variant, max_draws, max_logprobs, threads, backend, canonical }.config()?;
        preload_for(py, &config)?;
        let sampler = py.detach(|| build_from_logits(vocab_size, &config)).map_err(|error| failed(&error))?;
        Ok(Sampler::host(sampler, "logits"))
    }

    /// Draws one token for each row.
    ///
    /// input: hidden states [rows, hidden], or logits [rows, vocab], in bfloat16, float16 or float32.
    /// seed: the key of a row's noise, 0 to 2^64 - 1. Independent sequences need different seeds.
    /// position: the token's index in its sequence, 0 to 2^56 - 1; never a batch index.
    /// temperature: divides the logits; 0 takes the largest logit.
    /// top_k: keeps this many of the largest logits; None, 0 or -1: all.
    /// top_p: keeps the likeliest tokens up to this probability; None or 1: all.
    /// min_p: keeps probabilities of at least min_p times the largest; None or 0: all.
    /// mask: [rows, ceil(vocab / 32)] int32, a bitmap of allowed tokens: bit t % 32 of word t / 32.
    /// out: [rows] int64 of the result's kind, which gets the tokens and is returned.
    ///
    /// A parameter is a number for all rows, or a sequence or tensor [rows].
    ///
    /// Returns the tokens, [rows] int64: a tensor of torch on the input's device if the input is one, an array of CuPy
    /// likewise, otherwise of numpy (or a list without numpy). Waits for the tokens.
    ///
    /// Raises FlashSamplingError if a row fails; its `results` has the tokens of the other rows.
    #[pyo3(signature = (input, *, seed, position, temperature=None, top_k=None, top_p=None, min_p=None, mask=None,
        out=None))]
    #[allow(clippy::too_many_arguments)]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        input: &Bound<'py, PyAny>,
        seed: &Bound<'py, PyAny>,
        position: &Bound<'py, PyAny>,
        temperature: Option<&Bound<'py, PyAny>>,
        top_k: Option<&Bound<'py, PyAny>>,
        top_p: Option<&Bound<'py, PyAny>>,
        min_p: Option<&Bound<'py, PyAny>>,
        mask: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (tensor, rows) = self.borrow(input)?;
        let seeds = noise_key(Some(seed), "seed", rows, SEEDS)?;
        let positions = noise_key(Some(position), "position", rows, POSITIONS)?;
        let float = |object: Option<&Bound<'_, PyAny>>, name, default| {
            object.map_or(Ok(Column::Same(default)), |object| floats(object, name, rows))
        };
        let temperature = float(temperature, "temperature", 1.0)?;
        let (top_p, min_p) = (float(top_p, "top_p", 1.0)?, float(min_p, "min_p", 0.0)?);
        let top_k: Column<i32> = match top_k {
            Some(object) => integers(object, "top_k", rows, "-1 to 2^31 - 1")?,
            None => Column::Same(0),
        };
        if let Some(row) = (0..rows).find(|&row| top_k.get(row) < -1) {
            let text = format!("top_k is {}, but must be at least -1", top_k.get(row));
            return Err(invalid_in_row(row, "top_k", text));
        }
        check_noise(rows, &seeds, &positions, matches!(temperature, Column::Same(0.0)))?;
        let mask = mask.map(|mask| self.mask(mask, rows)).transpose()?;
        let params = (0..rows).map(|row| RowParams {
            seed: seeds.get(row).unwrap_or(0),
            position: positions.get(row).unwrap_or(0),
            temperature: temperature.get(row),
            top_k: u32::try_from(top_k.get(row)).unwrap_or(0),
            top_p: top_p.get(row),
            min_p: min_p.get(row),
            mask: mask.as_ref().map(|(words, all)| {
                let from = if all.len() == *words { 0 } else { row * words };
                &all[from..from + words]
            }),
            ..RowParams::default()
        });
        let (tokens, errors) = py.detach(|| {
            self.draw(&tensor, params, |samples| {
                let mut errors = Vec::new();
                let mut bytes = Vec::with_capacity(8 * rows);
                for (row, sample) in samples.iter().enumerate() {
                    let token = sample.map(|sample| i64::from(sample.token()));
                    bytes.extend(token.unwrap_or(-1).to_ne_bytes());
                    errors.extend(token.err().map(|error| (row, error)));
                }
                (bytes, errors)
            })
        })?;
        let tokens = deliver(py, input, &tokens, "int64", out)?;
        if errors.is_empty() { Ok(tokens) } else { Err(of_rows(py, &errors, tokens)) }
    }

    /// Draws with the parameters of requests, and returns all results.
    ///
    /// input: hidden states [rows, hidden], or logits [rows, vocab], in bfloat16, float16 or float32.
    /// params: one SamplingParams for all rows, or one for each row.
    /// histories: the sequences of the rows, for penalties and min_tokens; None: no tokens.
    /// seed: the seeds of rows whose SamplingParams has none.
    /// position: the positions of the tokens in their sequences; None: the lengths of the histories.
    ///
    /// Returns one RowSample for each row. Waits for the results.
    ///
    /// Raises FlashSamplingError if a row fails; its `results` has the RowSamples of the other rows.
    #[pyo3(signature = (input, params, histories=None, *, seed=None, position=None))]
    fn sample<'py>(
        &self,
        py: Python<'py>,
        input: &Bound<'py, PyAny>,
        params: &Bound<'py, PyAny>,
        histories: Option<Vec<Bound<'py, History>>>,
        seed: Option<&Bound<'py, PyAny>>,
        position: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (tensor, rows) = self.borrow(input)?;
        let params = match params.cast::<SamplingParams>() {
            Ok(same) => Column::Same(same.clone()),
            Err(_) => Column::Each(params.extract::<Vec<Bound<'_, SamplingParams>>>()?),
        };
        if let Column::Each(list) = &params
            && list.len() != rows
        {
            return Err(invalid("params", format!("params has {} values for {rows} rows", list.len())));
        }
        if let Some(histories) = histories.as_ref().filter(|histories| histories.len() != rows) {
            return Err(invalid("histories", format!("histories has {} values for {rows} rows", histories.len())));
        }
        let of_row = |row: usize| match &params {
            Column::Same(params) => params,
            Column::Each(list) => &list[row],
        };
        let checked = (0..rows).map(|row| of_row(row).get().for_vocab(self.vocab_size, row));
        let checked = checked.collect::<PyResult<Vec<_>>>()?;
        let given = noise_key(seed, "seed", rows, SEEDS)?;
        let seeds: Vec<Option<u64>> = (0..rows).map(|row| checked[row].fields().seed.or(given.get(row))).collect();
        if let Some(row) = seeds.iter().position(Option::is_none) {
            let text = "neither the row's SamplingParams nor the argument seed has a seed";
            return Err(invalid_in_row(row, "seed", text));
        }
        let positions = match (noise_key(position, "position", rows, POSITIONS)?, &histories) {
            (Column::Same(None), Some(histories)) => {
                Column::Each(histories.iter().map(|history| Some(history.get().len(py) as u64)).collect())
            }
            (Column::Same(None), None) => {
                return Err(invalid(
                    "position",
                    "position must be given, or histories whose lengths are the positions",
                ));
            }
            (positions, _) => positions,
        };
        let is_same = matches!(params, Column::Same(_))
            && (checked.first().is_some_and(|p| p.fields().seed.is_some()) || matches!(given, Column::Same(_)));
        if is_same {
            let greedy = checked.iter().all(|params| params.fields().temperature == 0.0);
            check_noise(rows, &Column::Same(None), &positions, greedy)?;
        }
        let histories: Option<Vec<_>> =
            histories.map(|list| list.iter().map(|history| history.get().shared()).collect());
        let (results, errors) = py.detach(|| {
            // The histories cannot change during the call.
            let guards: Option<Vec<_>> = histories.as_ref().map(|list| {
                list.iter().map(|history| history.read().unwrap_or_else(PoisonError::into_inner)).collect()
            });
            let rows = checked.iter().enumerate().map(|(row, params)| {
                let history = guards.as_ref().map(|guards| &*guards[row]);
                params.row(seeds[row].unwrap_or(0), positions.get(row).unwrap_or(0), history)
            });
            self.draw(&tensor, rows, |samples| {
                let mut errors: Vec<(usize, RowError)> = Vec::new();
                let results = samples.iter().enumerate().map(|(row, sample)| match sample {
                    Ok(sample) => Some(RowSample::from(sample)),
                    Err(error) => {
                        errors.push((row, error));
                        None
                    }
                });
                (results.collect::<Vec<_>>(), errors)
            })
        })?;
        let results = PyList::new(py, results)?.into_any();
        if errors.is_empty() { Ok(results) } else { Err(of_rows(py, &errors, results)) }
    }

    /// The size of the vocabulary.
    #[getter]
    fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// The largest number of rows of a call.
    #[getter]
    fn max_rows(&self) -> usize {
        self.plan.max_rows
    }

    /// The backend, with the instruction set or device if it matters.
    #[getter]
    fn backend(&self) -> &'static str {
        self.backend
    }

    /// Whether tokens are the argmax of logits plus noise; otherwise, tokens have the same probabilities only.
    #[getter]
    fn is_pathwise(&self) -> bool {
        self.exactness == Exactness::Pathwise
    }

    fn __repr__(&self) -> String {
        let Sampler { plan, vocab_size, place, backend, input, .. } = self;
        let max_rows = plan.max_rows;
        format!("Sampler(of {input}, vocab_size={vocab_size}, max_rows={max_rows}, on {place} by {backend})")
    }
}
