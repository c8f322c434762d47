//! A progress bar for text that does not appear on the terminal.

use super::sequence::Sequence;
use crate::args::{Format, GenerateArgs};
use crate::output::progress;
use indicatif::ProgressBar;
use std::io::{self, IsTerminal};

/// A bar of written tokens.
pub(super) struct Progress {
    bar: ProgressBar,
    /// Maximum of tokens per sequence.
    each: u64,
}

impl Progress {
    /// A bar for sequences with `positions` positions left in the model.
    pub(super) fn new(args: &GenerateArgs, positions: usize) -> Self {
        let each = u64::from(args.text.max_tokens).min(positions as u64);
        let bar = match args.format {
            Format::Text if io::stdout().is_terminal() => ProgressBar::hidden(),
            _ => progress::bar("writing", each * u64::from(args.text.num_sequences)),
        };
        Progress { bar, each }
    }

    /// Hides the bar during a write.
    pub(super) fn suspend<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }

    /// Updates position and length; a finished sequence counts its written tokens only.
    pub(super) fn update(&self, sequences: &[Sequence<'_>]) {
        let written = |sequence: &Sequence<'_>| sequence.history.output().len() as u64;
        let most = |sequence: &Sequence<'_>| if sequence.end.is_some() { written(sequence) } else { self.each };
        self.bar.set_length(sequences.iter().map(most).sum());
        self.bar.set_position(sequences.iter().map(written).sum());
    }

    pub(super) fn end(&self) {
        self.bar.finish_and_clear();
    }
}
