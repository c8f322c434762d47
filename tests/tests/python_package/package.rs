//! The Python package as a backend: a child process that draws with `flash_sampling`.

use flash_sampling::SamplingParamsBuilder;
use flash_sampling_conformance::{BuildError, SamplerFactory};
use flash_sampling_core::backend::{Candidate, Winner, check_call};
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{
    Capabilities, Description, Head, Knob, Matrix, PerturbedArgmax, Plan, RowError, RowParams, SampleError, Samples,
    Shape,
};
use flash_sampling_cpu::{CpuOptions, Tiled};
use flash_sampling_cuda::CudaTiled;
use serde_json::{Value, json};
use std::io::{Error, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{LazyLock, Mutex, PoisonError};

/// The environment variable with the Python interpreter of the package; `python3` by default.
const INTERPRETER: &str = "FLASH_SAMPLING_PYTHON";

/// A running interpreter, or the reason why there is none.
type Interpreter = Result<Mutex<Child>, String>;

static WITH_NUMPY: LazyLock<Interpreter> = LazyLock::new(|| start("cpu"));
static WITH_TORCH: LazyLock<Interpreter> = LazyLock::new(|| start("cuda"));

/// Starts an interpreter for arrays on a device, and waits until it has imported the package.
fn start(device: &str) -> Interpreter {
    let program = std::env::var(INTERPRETER).unwrap_or_else(|_| "python3".into());
    let mut command = Command::new(&program);
    command.args(["-c", include_str!("draws.py"), device]);
    let failed = |error: Error| format!("{program} does not start: {error}");
    // The first start only tests the imports. The last line of its errors is the reason of a skip.
    let probe = command.stdin(Stdio::null()).output().map_err(failed)?;
    if !probe.status.success() {
        let text = String::from_utf8_lossy(&probe.stderr);
        return Err(format!("{program}: {}", text.lines().last().unwrap_or("no reason")));
    }
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().map_err(failed)?;
    reply(&mut child).map_err(failed)?;
    Ok(Mutex::new(child))
}

/// Reads a reply of the child process: a JSON text, and numbers.
fn reply(child: &mut Child) -> Result<(Value, Vec<f64>), Error> {
    let from = child.stdout.as_mut().ok_or_else(|| Error::other("no pipe"))?;
    let mut lengths = [[0; 8]; 2];
    from.read_exact(lengths.as_flattened_mut())?;
    let [mut text, mut bytes] = lengths.map(|length| vec![0; u64::from_le_bytes(length) as usize]);
    from.read_exact(&mut text)?;
    from.read_exact(&mut bytes)?;
    let numbers = bytes.chunks_exact(8).map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap_or_default()));
    Ok((serde_json::from_slice(&text)?, numbers.collect()))
}

/// Sends a request to an interpreter, and returns the reply.
///
/// # Errors
/// The package's error if the whole request fails, or the error of the pipe.
fn request(interpreter: &Mutex<Child>, call: &Value, memory: &[&[u8]]) -> Result<(Value, Vec<f64>), Error> {
    let mut child = interpreter.lock().unwrap_or_else(PoisonError::into_inner);
    let (text, length) = (call.to_string(), memory.iter().map(|part| part.len()).sum::<usize>());
    let to = child.stdin.as_mut().ok_or_else(|| Error::other("no pipe"))?;
    to.write_all(&(text.len() as u64).to_le_bytes())?;
    to.write_all(&(length as u64).to_le_bytes())?;
    to.write_all(text.as_bytes())?;
    memory.iter().try_for_each(|part| to.write_all(part))?;
    to.flush()?;
    let (value, numbers) = reply(&mut child)?;
    match value["error"].as_str() {
        Some(text) => Err(Error::other(text)),
        None => Ok((value, numbers)),
    }
}

/// The tiled sampler of the package: over numpy's arrays on the CPU, or over torch's tensors on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Package {
    Numpy,
    Torch,
}

impl Package {
    fn interpreter(self) -> &'static Interpreter {
        match self {
            Package::Numpy => &WITH_NUMPY,
            Package::Torch => &WITH_TORCH,
        }
    }
}

impl SamplerFactory for Package {
    fn name(&self) -> String {
        match self {
            Package::Numpy => "python/tiled".into(),
            Package::Torch => "torch/tiled".into(),
        }
    }

    fn unavailable(&self) -> Option<String> {
        self.interpreter().as_ref().err().cloned()
    }

    fn reference_variant(&self, _: &Head<'_>) -> Option<ReferenceVariant> {
        Some(ReferenceVariant::Tiled)
    }

    fn build<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let failed = |error: Error| BuildError(error.to_string());
        let interpreter = self.interpreter().as_ref().map_err(|reason| BuildError(reason.clone()))?;
        let can = match self {
            Package::Numpy => {
                let sampler = Tiled::new(head, plan, &CpuOptions::default());
                sampler.map_err(|error| BuildError(error.to_string()))?.capabilities()
            }
            Package::Torch => Capabilities { canonical: false, ..CudaTiled::capabilities_of(&plan) },
        };
        let (weight, bias) = (head.weight(), head.bias().unwrap_or_default());
        let bias: Vec<u8> = bias.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let shape = Shape { tokens: head.tokens(), vocab_size: head.vocab_size(), input: head.hidden() };
        let of_head = json!({
            "soft_cap": head.soft_cap(),
            "scale": head.scale(),
            "vocab_size": shape.vocab_size,
            "first_token": shape.tokens.start,
        });
        let options =
            json!({ "max_draws": plan.max_draws, "max_logprobs": plan.max_logprobs, "canonical": plan.canonical });
        let sampler = NEXT.fetch_add(1, Relaxed);
        let call = json!({
            "call": "build",
            "sampler": sampler,
            "weight": layout(&weight),
            "weight_bytes": weight.bytes().len(),
            "has_bias": head.bias().is_some(),
            "head": of_head,
            "max_rows": plan.max_rows,
            "options": options,
        });
        let (made, _) = request(interpreter, &call, &[weight.bytes(), &bias]).map_err(failed)?;
        let want = json!({ "backend": can.backend, "is_pathwise": true });
        if made != want {
            return Err(BuildError(format!("the package made a sampler with {made} instead of {want}")));
        }
        let of = Description { capabilities: can, shape, plan };
        Ok(Box::new(PythonSampler { interpreter, sampler, of }))
    }
}

/// The layout of a matrix whose bytes are sent.
fn layout(matrix: &Matrix<'_>) -> Value {
    let offset = matrix.bytes().as_ptr() as usize % 64;
    json!({
        "type": matrix.dtype().name(),
        "layout": [matrix.rows(), matrix.cols(), matrix.row_stride(), offset],
    })
}

/// A `Sampler` of the child process.
struct PythonSampler {
    interpreter: &'static Mutex<Child>,
    sampler: u64,
    of: Description,
}

impl Drop for PythonSampler {
    fn drop(&mut self) {
        let _ = request(self.interpreter, &json!({ "call": "drop", "sampler": self.sampler }), &[]);
    }
}

impl PerturbedArgmax for PythonSampler {
    fn description(&self) -> Description {
        self.of.clone()
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        let json_of = |row| row_of(row, self.of.shape.vocab_size);
        let call = json!({
            "call": "sample",
            "sampler": self.sampler,
            "hidden": layout(&input),
            "rows": rows.iter().map(json_of).collect::<Vec<_>>(),
        });
        // Rust and Python must refuse the same calls.
        let drawn = request(self.interpreter, &call, &[input.bytes()]);
        let checked = check_call(&input, rows, &self.of.shape, &self.of.plan);
        let (reply, numbers) = match (drawn, checked) {
            (Ok(drawn), Ok(())) => drawn,
            (Err(_), Err(error)) => return Err(error),
            (Ok(_), Err(error)) => return Err(backend(Error::other(format!("the package does not refuse: {error}")))),
            (Err(error), Ok(())) => return Err(backend(error)),
        };
        let mut numbers = Numbers(numbers.into_iter());
        for (at, row) in rows.iter().enumerate() {
            let found = &reply["errors"][at.to_string()];
            if found.is_null() {
                self.push(row, &mut numbers, out)?;
            } else {
                out.push_error(self.error_of(row, found).map_err(|text| backend(Error::other(text)))?);
            }
        }
        Ok(())
    }
}

fn backend(error: Error) -> SampleError {
    SampleError::Backend { backend: "python", source: Box::new(error) }
}

/// The numbers of a reply.
struct Numbers(std::vec::IntoIter<f64>);

impl Numbers {
    fn next(&mut self) -> f64 {
        self.0.next().expect("Python sends all numbers of a row")
    }

    /// Reads a list after its length.
    fn list(&mut self) -> Vec<f64> {
        (0..self.next() as usize).map(|_| self.next()).collect()
    }

    /// Reads tokens and their logits.
    fn pairs(&mut self) -> Vec<(u32, f32)> {
        self.list().chunks_exact(2).map(|pair| (pair[0] as u32, pair[1] as f32)).collect()
    }
}

impl PythonSampler {
    /// Appends the results of a row.
    fn push(&self, row: &RowParams<'_>, numbers: &mut Numbers, out: &mut Samples) -> Result<(), SampleError> {
        let count = numbers.next() as usize;
        let draws: Vec<Candidate> = (0..count)
            .map(|_| {
                let token = numbers.next() as u32;
                let (score, logit) = (numbers.next() as f32, numbers.next() as f32);
                Candidate { winner: Winner::new(score, token), logit }
            })
            .collect();
        let (raw, ranks) = (numbers.list(), numbers.list());
        let (top, given) = (numbers.pairs(), numbers.pairs());
        let (log_z, kept, passes) = (numbers.list(), numbers.list(), numbers.list());
        let top = top.iter().map(|&(token, logit)| Candidate { winner: Winner::new(logit, token), logit });
        match row.check(&[], &self.of.capabilities, &self.of.plan, self.of.shape.vocab_size) {
            Err(error) if is_beyond_python(row) => {
                out.push_error(error);
                return Ok(());
            }
            Err(error) => return Err(backend(Error::other(format!("the package does not refuse: {error}")))),
            Ok(_) => {}
        }
        out.push_row(draws, None, &top.collect::<Vec<_>>());
        log_z.first().into_iter().for_each(|&log_z| out.set_log_z(log_z));
        out.set_raw_logits(raw.into_iter().map(|logit| logit as f32));
        out.set_tokens(out.len() - 1, given, ranks.into_iter().map(|rank| rank as u32));
        if let Some((&log_mass, tokens)) = kept.split_first() {
            out.set_kept(tokens.iter().map(|&token| token as u32), log_mass, self.of.shape.vocab_size);
        }
        out.set_passes(passes[0] as u32);
        Ok(())
    }

    /// Returns the error that Python's error of a row stands for. Python must name the knob that Rust names.
    fn error_of(&self, row: &RowParams<'_>, found: &Value) -> Result<RowError, String> {
        let (knob, text) = (found[0].as_str(), found[1].as_str().unwrap_or_default());
        if let Err(error) = row.check(&[], &self.of.capabilities, &self.of.plan, self.of.shape.vocab_size) {
            let named = knob.is_some_and(|knob| error.to_string().contains(rust_name(knob)));
            return if named { Ok(error) } else { Err(format!("the package has {found}, but Rust has {error}")) };
        }
        // The text of any other error is Rust's text, after the number of the row.
        let text = text.split_once(": ").map_or(text, |(_, text)| text);
        let numbers: Vec<u32> = text.split(' ').filter_map(|word| word.parse().ok()).collect();
        let number = |at: usize| numbers.get(at).copied().unwrap_or_default();
        let errors = [
            RowError::NoFiniteLogit,
            RowError::NaN { token: number(0) },
            RowError::PositiveInfinity { token: number(0) },
            RowError::SupportTooSmall { draws: number(0), available: number(1) },
        ];
        errors.into_iter().find(|error| error.to_string() == text).ok_or_else(|| format!("an unknown error: {found}"))
    }
}

/// Returns Rust's name of an argument of Python.
fn rust_name(knob: &str) -> &str {
    match knob {
        "n" => Knob::Draws.name(),
        "banned_token_ids" => Knob::Banned.name(),
        knob => knob,
    }
}

/// Whether Python cannot express the parameters of a row.
///
/// Rust refuses such parameters. Python gets them without the fault: biases are a dict, breakers are sorted, and
/// `logprob_token_ids` imply `logprobs`.
fn is_beyond_python(row: &RowParams<'_>) -> bool {
    let is_dict = row.logit_bias.is_sorted_by(|(a, _), (b, _)| a < b);
    let has_ids_alone = !row.logprob_token_ids.is_empty() && row.logprobs.is_none();
    !is_dict || !row.dry_sequence_breakers.is_sorted() || has_ids_alone
}

/// The parameters of a row, as the child process reads them, without those that are defaults.
fn row_of(row: &RowParams<'_>, vocab_size: u32) -> Value {
    let given = SamplingParamsBuilder {
        n: row.draws,
        temperature: row.temperature,
        top_p: row.top_p,
        top_k: i32::try_from(row.top_k).unwrap_or(i32::MAX),
        min_p: row.min_p,
        seed: None,
        presence_penalty: row.presence_penalty,
        frequency_penalty: row.frequency_penalty,
        repetition_penalty: row.repetition_penalty,
        logit_bias: row.logit_bias.iter().copied().collect(),
        allowed_token_ids: None,
        banned_token_ids: row.banned.to_vec(),
        min_tokens: row.min_tokens,
        stop_token_ids: row.stop_token_ids.to_vec(),
        // Python refuses more log-probabilities than tokens.
        logprobs: row.logprobs.map(|count| count.min(vocab_size)),
        logprobs_mode: row.logprobs_mode,
        logprob_token_ids: row.logprob_token_ids.to_vec(),
        ranks: row.ranks,
        top_n_sigma: row.top_n_sigma,
        epsilon_cutoff: row.epsilon_cutoff,
        typical_p: row.typical_p,
        xtc_threshold: row.xtc_threshold,
        xtc_probability: row.xtc_probability,
        dry_multiplier: row.dry_multiplier,
        dry_base: row.dry_base,
        dry_allowed_length: row.dry_allowed_length,
        dry_penalty_last_n: i32::try_from(row.dry_penalty_last_n).unwrap_or(-1),
        dry_sequence_breakers: row.dry_sequence_breakers.to_vec(),
        order: row.order,
        without_replacement: row.without_replacement,
        kept: row.kept,
    };
    let fields = |params| serde_json::to_value::<SamplingParamsBuilder>(params).unwrap_or_default();
    let (mut params, default) = (fields(given), fields(SamplingParamsBuilder::default()));
    if let Value::Object(params) = &mut params {
        params.retain(|name, value| default[name.as_str()] != *value);
    }
    json!({
        "seed": row.seed,
        "position": row.position,
        "first_draw": row.first_draw,
        "mask": row.mask,
        "history": row.history.map_or_else(Default::default, |history| [history.prompt(), history.output()]),
        "params": params.to_string(),
    })
}
