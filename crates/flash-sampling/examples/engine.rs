//! An engine's loop on the CPU: serves requests with different parameters and lengths in one batch.
//!
//! `cargo run --release --example engine -p flash-sampling`
//!
//! Instead of a model, a function computes a hidden state from a sequence's last tokens. A request draws the same
//! tokens in any batch, because its noise depends only on its seed and its position.

use flash_sampling::{
    Backend, BackendConfig, Head, History, Matrix, PerturbedArgmax, Plan, RowBuffer, Samples, SamplingParams,
    VariantConfig, build,
};
use std::error::Error;

const VOCAB: usize = 32_000;
const HIDDEN: usize = 128;
const MAX_ROWS: usize = 4;

/// A running request.
struct Sequence {
    number: u64,
    /// The seed, if the request has none.
    seed: u64,
    params: SamplingParams,
    history: History,
    max_tokens: usize,
}

/// Replaces the layers of a model: writes the hidden state of a sequence, `[HIDDEN]`.
fn forward(history: &History, out: &mut [f32]) {
    let last = history.tokens().iter().rev().take(3);
    let mix = last.fold(1u32, |mix, token| mix.wrapping_mul(31).wrapping_add(*token));
    out.iter_mut().zip(1..).for_each(|(h, i)| *h = (mix.wrapping_mul(i) % 1000) as f32 / 250.0 - 2.0);
}

/// Draws the next token of every sequence.
fn step(
    sampler: &mut dyn PerturbedArgmax,
    sequences: &mut [Sequence],
    rows: &mut RowBuffer,
    samples: &mut Samples,
) -> Result<(), Box<dyn Error>> {
    let mut hidden = vec![0.0; sequences.len() * HIDDEN];
    sequences.iter().zip(hidden.chunks_mut(HIDDEN)).for_each(|(sequence, out)| forward(&sequence.history, out));
    let input = Matrix::new(&hidden, sequences.len(), HIDDEN)?;
    let params = sequences.iter().map(|sequence| sequence.params.next_row(sequence.seed, &sequence.history));
    rows.with(params, |rows| sampler.sample(input, rows, samples))?;
    for (sequence, sample) in sequences.iter_mut().zip(samples.iter()) {
        // A row's error concerns its request only: a server would end the request and continue with the others.
        sequence.history.push(sample?.token());
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let weight: Vec<f32> = (0..VOCAB * HIDDEN).map(|i| ((i * 7919) % 2003) as f32 / 1000.0 - 1.0).collect();
    let head = Head::new(Matrix::new(&weight, VOCAB, HIDDEN)?)?;
    let config = BackendConfig {
        backend: Backend::default(),
        variant: VariantConfig::Tiled,
        plan: Plan { max_rows: MAX_ROWS, ..Plan::default() },
        ..BackendConfig::default()
    };
    let mut sampler = build(head, &config)?;
    let (mut rows, mut samples) = (RowBuffer::default(), Samples::new());

    let builders = [
        SamplingParams::builder().temperature(0.8).top_p(0.95),
        SamplingParams::builder().temperature(0.0),
        SamplingParams::builder().top_k(40).repetition_penalty(1.1),
        SamplingParams::builder().min_p(0.05).seed(Some(7)),
        SamplingParams::builder(),
        SamplingParams::builder().presence_penalty(0.5),
    ];
    let request = |(number, builder): (u64, flash_sampling::SamplingParamsBuilder)| {
        Ok::<_, Box<dyn Error>>(Sequence {
            number,
            seed: 1000 + number,
            params: builder.build(VOCAB as u32)?,
            history: History::new(&[1, 2, number as u32]),
            max_tokens: 5 + 3 * number as usize,
        })
    };
    let mut waiting = (0..).zip(builders).map(request).collect::<Result<Vec<_>, _>>()?;
    waiting.reverse();

    let mut running: Vec<Sequence> = Vec::new();
    for number in 1.. {
        running.extend((running.len()..MAX_ROWS).filter_map(|_| waiting.pop()));
        if running.is_empty() {
            break;
        }
        step(&mut *sampler, &mut running, &mut rows, &mut samples)?;
        for done in running.extract_if(.., |sequence| sequence.history.output().len() == sequence.max_tokens) {
            println!("step {number}: request {} drew {:?}", done.number, done.history.output());
        }
    }
    Ok(())
}
