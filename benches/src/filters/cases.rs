//! The cases of the filter benchmarks, with their lists, and a draw of such rows that counts passes. Every backend uses
//! the same cases.

use flash_sampling::{History, RowParams, SampleError, Samples};
use flash_sampling_cli::bench::record::{Passes, Section};
use flash_sampling_cli::error::CommandError;
use flash_sampling_cli::input::synthetic::mix;
use std::cell::Cell;
use std::rc::Rc;

/// The parameters of the rows of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// No filter: the baseline.
    Plain,
    /// Min-p 0.05.
    MinP,
    /// Top-k 20.
    TopK,
    /// Top-k 50, then top-p 0.9.
    TopKTopP,
    /// Top-p 0.95.
    TopP,
    /// Repetition, frequency and presence penalties over [`PENALISED`] tokens per row.
    Penalties,
    /// A mask that allows [`ALLOWED`] tokens.
    Mask,
    /// The largest 5 log-probabilities.
    FewLogprobs,
    /// The largest [`MOST_LOGPROBS`] log-probabilities.
    Logprobs,
}

/// The number of tokens in a row's history.
pub const PENALISED: u64 = 1000;
/// The largest number of log-probabilities of a row.
pub const MOST_LOGPROBS: u32 = 20;
/// The number of tokens that a row's mask allows.
pub const ALLOWED: u64 = 100;

impl Case {
    /// The cases that one pass on the device can decide; the plain draw is first.
    pub const ALL: [Case; 7] =
        [Case::Plain, Case::MinP, Case::TopK, Case::TopKTopP, Case::TopP, Case::Penalties, Case::Mask];

    /// The name that tables and records show.
    pub fn name(self) -> &'static str {
        match self {
            Case::Plain => "plain",
            Case::MinP => "min-p 0.05",
            Case::TopK => "top-k 20",
            Case::TopKTopP => "top-k 50, top-p 0.9",
            Case::TopP => "top-p 0.95",
            Case::Penalties => "penalties, 1000 tokens",
            Case::Mask => "mask of 100 tokens",
            Case::FewLogprobs => "5 log-probabilities",
            Case::Logprobs => "20 log-probabilities",
        }
    }

    /// The parameters of row `r`, with this seed and position.
    pub fn row<'a>(self, lists: &'a Lists, r: usize, seed: u64, position: u64) -> RowParams<'a> {
        let row = RowParams { seed, position, ..RowParams::default() };
        match self {
            Case::Plain => row,
            Case::MinP => RowParams { min_p: 0.05, ..row },
            Case::TopK => RowParams { top_k: 20, ..row },
            Case::TopKTopP => RowParams { top_k: 50, top_p: 0.9, ..row },
            Case::TopP => RowParams { top_p: 0.95, ..row },
            Case::Penalties => RowParams {
                history: Some(&lists.histories[r]),
                repetition_penalty: 1.1,
                frequency_penalty: 0.1,
                presence_penalty: 0.1,
                ..row
            },
            Case::Mask => RowParams { mask: Some(&lists.masks[r]), ..row },
            Case::FewLogprobs => RowParams { logprobs: Some(5), temperature: 0.8, ..row },
            Case::Logprobs => RowParams { logprobs: Some(MOST_LOGPROBS), temperature: 0.8, ..row },
        }
    }
}

/// The lists of each row.
#[derive(Clone, Debug)]
pub struct Lists {
    histories: Vec<History>,
    masks: Vec<Vec<u32>>,
}

impl Lists {
    /// Makes different lists for each row; half of a history is the prompt.
    pub fn new(vocab: usize, rows: usize) -> Self {
        let token = |r: usize, i: u64| (mix(mix(r as u64) ^ i) % vocab as u64) as u32;
        let history = |r: usize| {
            let prompt: Vec<u32> = (0..PENALISED / 2).map(|i| token(r, i)).collect();
            let mut history = History::new(&prompt);
            history.extend((PENALISED / 2..PENALISED).map(|i| token(r, i)));
            history
        };
        let mask = |r: usize| {
            let mut mask = vec![0u32; vocab.div_ceil(32)];
            for i in 0..ALLOWED {
                let token = token(r, PENALISED + i);
                mask[(token >> 5) as usize] |= 1 << (token & 31);
            }
            mask
        };
        Lists { histories: (0..rows).map(history).collect(), masks: (0..rows).map(mask).collect() }
    }
}

/// The passes of each contender.
pub type CountedPasses = Vec<Rc<Cell<Passes>>>;

/// Adds the passes of the contenders to their section.
pub fn with_passes(mut section: Section, passes: &CountedPasses) -> Section {
    for (entry, passes) in section.entries.iter_mut().zip(passes) {
        entry.passes = Some(passes.get());
    }
    section
}

/// Draws each row by `sample`; every call has its own position.
pub fn draw<'a>(
    case: Case,
    lists: &'a Lists,
    rows: usize,
    mut sample: impl FnMut(&[RowParams<'_>], &mut Samples) -> Result<(), SampleError> + 'a,
    passes: Rc<Cell<Passes>>,
) -> impl FnMut() -> Result<(), CommandError> + 'a {
    let mut position = 0;
    let mut out = Samples::new();
    let mut params = vec![RowParams::default(); rows];
    move || {
        for (r, params) in params.iter_mut().enumerate() {
            *params = case.row(lists, r, r as u64, position);
        }
        position += 1;
        sample(&params, &mut out)?;
        let mut seen = passes.get();
        for row in out.iter() {
            let row = row.map_err(|error| CommandError::usage(format!("a row of the benchmark failed: {error}")))?;
            seen.add(row.passes);
        }
        passes.set(seen);
        Ok(())
    }
}
