//! Runs of the command, and files for it.

use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `flash-sampling` with these arguments and without log lines.
pub(crate) fn run<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Run {
    run_logging("off", args)
}

/// The program built by cargo; on a machine without cargo, `FLASH_SAMPLING_PROGRAM`.
fn program() -> PathBuf {
    let built = Path::new(env!("CARGO_BIN_EXE_flash-sampling"));
    std::env::var_os("FLASH_SAMPLING_PROGRAM").map_or_else(|| built.to_owned(), PathBuf::from)
}

pub(crate) fn run_logging<S: AsRef<std::ffi::OsStr>>(log: &str, args: &[S]) -> Run {
    run_command(Command::new(program()).args(args), log)
}

/// Runs the program on the first `gpus` GPUs, alone or as several processes under `mpirun`, which ends ranks that hang.
#[cfg(feature = "cuda")]
pub(crate) fn run_on_gpus<S: AsRef<std::ffi::OsStr>>(gpus: usize, processes: usize, args: &[S]) -> Run {
    let mut command = Command::new(if processes > 1 { "mpirun".into() } else { program() });
    if processes > 1 {
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command.args(["--oversubscribe", "--timeout", "60", "-n", &processes.to_string()]).arg(program());
    }
    let visible: Vec<_> = (0..gpus).map(|gpu| gpu.to_string()).collect();
    run_command(command.env("CUDA_VISIBLE_DEVICES", visible.join(",")).args(args), "off")
}

/// Runs a command with this level of the log.
pub(crate) fn run_command(command: &mut Command, log: &str) -> Run {
    let output = command.env("FLASH_SAMPLING_LOG", log).output().expect("the command starts");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    Run { code: output.status.code().expect("no signal"), stdout: text(output.stdout), stderr: text(output.stderr) }
}

impl Run {
    /// The rows of `--format json`.
    pub(crate) fn rows(&self) -> Vec<Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).expect("one JSON object a line")).collect()
    }

    /// Asserts exit code 2, no output, and one line on standard error that contains `says`.
    pub(crate) fn assert_refused(&self, says: &str) {
        let lines: Vec<_> = self.stderr.lines().collect();
        assert!(self.code == 2 && self.stdout.is_empty() && lines.len() == 1, "{self:#?}");
        assert!(lines[0].starts_with("error: ") && lines[0].contains(says), "expected {says:?} in {:?}", lines[0]);
    }

    pub(crate) fn tokens(&self) -> Vec<Vec<u64>> {
        assert_eq!(self.code, 0, "{self:#?}");
        let tokens = |row: &Value| row["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap()).collect();
        self.rows().iter().map(tokens).collect()
    }
}

/// Runs `base` with the flags of each line `FLAGS => ERROR`, and asserts that they are refused with this error.
pub(crate) fn assert_refusals(base: &[String], lines: &str) {
    for line in lines.trim().lines() {
        let (flags, says) = line.trim_start().split_once(" => ").expect("FLAGS => ERROR");
        run(&with(base, flags)).assert_refused(says);
    }
}

/// A folder of files, removed at the end.
pub(crate) struct Files(TempDir);

impl Files {
    pub(crate) fn new() -> Self {
        Files(TempDir::new().expect("a temporary folder"))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file of these bytes, and returns its path.
    pub(crate) fn bytes(&self, name: &str, bytes: &[u8]) -> String {
        std::fs::write(self.path(name), bytes).expect("a writable folder");
        self.name(name)
    }

    pub(crate) fn name(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").to_owned()
    }

    pub(crate) fn folder(&self) -> &Path {
        self.0.path()
    }

    /// A safetensors file of `(name, dtype, shape, bytes)`.
    pub(crate) fn safetensors(&self, name: &str, tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) -> String {
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            (*name, TensorView::new(*dtype, shape.to_vec(), bytes).expect("bytes of that shape"))
        });
        self.bytes(name, &safetensors::serialize(views, None).expect("a valid file"))
    }

    /// A file of numpy's format, version 1.
    pub(crate) fn npy<T: NpyElement>(&self, name: &str, shape: &[u64], data: &[T]) -> String {
        let lengths: Vec<_> = shape.iter().map(u64::to_string).collect();
        let shape = lengths.join(", ") + if shape.len() == 1 { "," } else { "" };
        let header = format!("{{'descr': '{}', 'fortran_order': False, 'shape': ({shape}), }}", T::DTYPE);
        // With the line feed, the data begin at a multiple of 64 bytes.
        let size = (10 + header.len() + 1).next_multiple_of(64) - 10;
        let header = format!("{header:<width$}\n", width = size - 1);
        let data = data.iter().flat_map(|element| element.bytes()).collect::<Vec<u8>>();
        let begin = [&b"\x93NUMPY\x01\x00"[..], &(size as u16).to_le_bytes()].concat();
        self.bytes(name, &[&begin, header.as_bytes(), &data].concat())
    }
}

/// An element type of numpy.
pub(crate) trait NpyElement {
    const DTYPE: &'static str;
    fn bytes(&self) -> Vec<u8>;
}

macro_rules! npy_elements {
    ($($type:ty: $dtype:literal),*) => {$(
        impl NpyElement for $type {
            const DTYPE: &'static str = $dtype;
            fn bytes(&self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
        }
    )*};
}

npy_elements!(half::f16: "<f2", f32: "<f4", f64: "<f8", i32: "<i4", u32: "<u4", u64: "<u8");

/// Deterministic values between -1 and 1, multiples of 1/8, which every float type holds.
pub(crate) fn values(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729 + i / 13) % 17) as f32 / 8.0 - 1.0).collect()
}

pub(crate) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub(crate) fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect()
}

/// A head `[300, 32]` in bf16 and hidden states `[3, 32]` in f32 in a folder, and the flags that name them.
pub(crate) fn small_head() -> (Files, Vec<String>) {
    let files = Files::new();
    let weight =
        files.safetensors("w.safetensors", &[("w", Dtype::BF16, &[300, 32], bf16_bytes(&values(300 * 32, 1)))]);
    let hidden = files.npy("h.npy", &[3, 32], &values(3 * 32, 2));
    (files, words(&format!("sample --format json --weight {weight} --hidden {hidden}")))
}

/// Words separated by spaces; `~` is a space within a word.
pub(crate) fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(|word| word.replace('~', " ")).collect()
}

/// `base` and more flags, separated by spaces.
pub(crate) fn with(base: &[String], more: &str) -> Vec<String> {
    [base, &words(more)].concat()
}

/// The path of a file or folder in `tests/checkpoints`.
pub(crate) fn checkpoint(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/checkpoints").join(name);
    path.to_str().expect("UTF-8").to_owned()
}

/// Runs `generate --format json` with more flags; returns one object per sequence.
pub(crate) fn generate(flags: &str) -> Vec<Value> {
    let run = run(&words(&format!("generate --format json {flags}")));
    assert_eq!(run.code, 0, "{run:#?}");
    run.rows()
}

/// Asserts that two sequences have the same tokens, and log-probabilities that differ by less than `nats`.
pub(crate) fn assert_same_sequence(found: &Value, want: &Value, nats: f64, what: &str) {
    assert_eq!(found["tokens"], want["tokens"], "{what}");
    let logprobs = |of: &Value| -> Vec<f64> {
        of["logprobs"].as_array().unwrap().iter().map(|logprob| logprob.as_f64().unwrap()).collect()
    };
    let (found, want) = (logprobs(found), logprobs(want));
    assert_eq!(found.len(), want.len(), "{what}");
    for (at, (found, want)) in found.iter().zip(want).enumerate() {
        assert!((found - want).abs() < nats, "{what} at {at}: {found} for {want}");
    }
}

/// Asserts that a model has the greedy tokens and log-probabilities of `transformers` on a checkpoint.
pub(crate) fn assert_greedy(model: &str, name: &str) {
    let expected = std::fs::read(checkpoint(&format!("{name}/greedy.json"))).unwrap();
    let expected: Vec<Value> = serde_json::from_slice(&expected).unwrap();
    assert_eq!(expected.len(), 3);
    for expected in expected {
        let (prompt, count) = (expected["prompt"].as_str().unwrap(), expected["tokens"].as_array().unwrap().len());
        let args = ["generate", "--format", "json", "--model", model, "--prompt", prompt].map(String::from);
        let found = run(&with(&args, &format!("--max-tokens {count} --temperature 0 --logprobs 2")));
        let found = &found.rows()[0];
        assert_eq!(found["prompt_tokens"], expected["prompt_tokens"], "{name}");
        assert_same_sequence(found, &expected, 1e-4, &format!("{name}: {prompt}"));
    }
}

/// Whether the library in the command has the feature `cuda`; a build of the whole workspace adds it.
pub(crate) fn has_cuda() -> bool {
    use flash_sampling::{Backend, BackendConfig, BuildError, capabilities_of};
    let config = BackendConfig { backend: Backend::Cuda { device: 0 }, ..BackendConfig::default() };
    !matches!(capabilities_of(&config), Err(BuildError::NotBuilt { .. }))
}
