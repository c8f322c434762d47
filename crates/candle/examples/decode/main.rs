//! Times a decode step end to end, by candle and by this project.
//!
//! The layers are candle-transformers' Qwen3 with the shape of a real model and random weights, or the built-in model
//! `stories` (this project's layers, on the CPU). The next tokens come from our head, or from candle's matmul and one
//! of three samplers: candle's `LogitsProcessor`, candle's `gumbel_softmax`, or our sampler of logits.
//!
//! ```sh
//! cargo run --profile bench -p flash-sampling-candle --example decode -- [MODEL [SEQUENCES [CONTEXT [STEPS [DEVICE]]]]]
//! cargo run --profile bench -p flash-sampling-candle --features cuda --example decode -- 1.7b,8b 1,8,64 256 50 gpu
//! ```
//!
//! Models are bf16 on the GPU, and float32 on the CPU, where candle has no bf16 matmul. The contenders alternate at
//! every step, each with its own cache. Times are medians. "Head and draw" is timed in separate steps, between waits
//! for the GPU.
#![allow(clippy::print_stdout)]

mod heads;
mod layers;
mod shape;

use candle_core::{DType, Device, Result, Tensor, bail};
use heads::{Head, KEPT, NAMES, RIVAL};
use layers::{Checkpoint, Layers};
use std::path::Path;
use std::time::Instant;

const WARM_UP: usize = 5;

struct Contender<'m> {
    head: Head,
    layers: Layers<'m>,
    /// The last token of each sequence; [`Contender::position`] is the number of tokens before it.
    tokens: Vec<u32>,
    position: usize,
    total: Vec<f64>,
    last: Vec<f64>,
}

/// Steps of each contender. Two of three are timed as a whole, the third only from the head on.
fn rounds(steps: usize) -> usize {
    3 * (WARM_UP + steps).div_ceil(2)
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}

impl Contender<'_> {
    /// Adds a token to each sequence. `apart`: times only head and draw, else the whole step.
    fn step(&mut self, weight: &Tensor, apart: bool) -> Result<()> {
        let device = weight.device();
        device.synchronize()?;
        let mut start = Instant::now();
        let hidden = self.layers.hidden(&self.tokens, self.tokens.len(), self.position, weight)?;
        if apart {
            device.synchronize()?;
            start = Instant::now();
        }
        self.position += 1;
        // The tokens are copied to the host, which waits for them.
        self.tokens = self.head.next(&hidden, self.position as u64)?;
        let seconds = start.elapsed().as_secs_f64();
        if apart {
            self.last.push(seconds)
        } else {
            self.total.push(seconds)
        }
        Ok(())
    }
}

fn device(name: &str) -> Result<Device> {
    match name {
        "cpu" => Ok(Device::Cpu),
        "gpu" => Device::new_cuda(0),
        _ => bail!("\"{name}\" is neither cpu nor gpu"),
    }
}

fn machine(device: &Device) -> String {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        return cuda.cuda_stream().context().name().unwrap_or_else(|_| "a GPU".into());
    }
    format!("{device:?}, {} threads", candle_core::utils::get_num_threads())
}

fn numbers<T: std::str::FromStr>(words: &str) -> Result<Vec<T>> {
    let number = |word: &str| word.parse().map_err(|_| candle_core::Error::Msg(format!("\"{word}\" is no number")));
    words.split(',').map(number).collect()
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let word = |at: usize, usual: &str| words.get(at).cloned().unwrap_or_else(|| usual.into());
    let (models, sequences) = (word(0, "0.6b"), numbers::<usize>(&word(1, "1,8"))?);
    let (context, steps) = (numbers::<usize>(&word(2, "256"))?[0], numbers::<usize>(&word(3, "50"))?[0]);
    if context == 0 || steps == 0 || sequences.contains(&0) {
        bail!("there must be a sequence, a context and a step");
    }
    let device = device(&word(4, "cpu"))?;
    let dtype = if device.is_cuda() { DType::BF16 } else { DType::F32 };
    let commit = option_env!("FLASH_SAMPLING_COMMIT").unwrap_or("unknown");
    println!("decode {}, commit {commit}", words.join(" "));
    println!("{}; {dtype:?}; {context} tokens before, {steps} steps; milliseconds, medians", machine(&device));
    println!("| model | sequences | head and draw by | step | of candle's | head and draw | share |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for name in models.split(',') {
        let run = |layers: &Layers<'_>, weight: &Tensor| {
            sequences.iter().try_for_each(|&sequences| run(name, layers, weight, [sequences, context, steps]))
        };
        if name == "stories" {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/models/stories");
            let checkpoint = Checkpoint::open(&folder)?;
            let model = checkpoint.model()?;
            run(&Layers::Ours(&model, Vec::new()), &checkpoint.head(dtype, &device)?)?;
        } else {
            let (model, weight) = shape::random(&shape::of(name)?, context + rounds(steps) + 1, dtype, &device)?;
            run(&Layers::Candle(Box::new(model)), &weight)?;
        }
    }
    Ok(())
}

fn run(name: &str, layers: &Layers<'_>, weight: &Tensor, [sequences, context, steps]: [usize; 3]) -> Result<()> {
    let vocab = weight.dim(0)? as u32;
    let prompt: Vec<u32> = (0..(sequences * context) as u32).map(|i| i.wrapping_mul(2_654_435_761) % vocab).collect();
    let mut layers = layers.begin(sequences);
    layers.hidden(&prompt, sequences, 0, weight)?;
    let mut contenders = Vec::new();
    let kinds = if weight.dtype() == DType::BF16 { KEPT } else { NAMES.len() };
    for kind in 0..kinds {
        let head = Head::new(kind, weight, sequences)?;
        let (layers, tokens) = (layers.clone(), vec![1; sequences]);
        contenders.push(Contender { head, layers, tokens, position: context, total: Vec::new(), last: Vec::new() });
    }
    drop(layers);
    for step in 0..rounds(steps) {
        // The order changes with each step: a contender that leaves the GPU idle makes the next one run cooler.
        for i in 0..contenders.len() {
            let at = (i + step / 2) % contenders.len();
            let at = if step % 2 == 0 { at } else { contenders.len() - 1 - at };
            contenders[at].step(weight, step % 3 == 2)?;
        }
    }
    let medians = contenders.iter_mut().map(|c| [median(&mut c.total[WARM_UP..]), median(&mut c.last[WARM_UP / 2..])]);
    let medians: Vec<[f64; 2]> = medians.collect();
    for (kind, [total, last]) in NAMES.iter().zip(&medians) {
        println!(
            "| {name} | {sequences} | {kind} | {:.3} | {:.3} | {:.3} | {:.0}% |",
            total * 1e3,
            total / medians[RIVAL][0],
            last * 1e3,
            100.0 * last / total,
        );
    }
    Ok(())
}
