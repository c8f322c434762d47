//! How far the text is, where it is not on the terminal as it comes.

use super::sequence::Sequence;
use crate::args::{Format, GenerateArgs};
use crate::progress;
use indicatif::ProgressBar;
use std::io::{self, IsTerminal};

/// A bar of the tokens that are written, of those that there may be.
pub(super) struct Progress {
    bar: ProgressBar,
    /// Tokens of a sequence, at most.
    each: u64,
}

impl Progress {
    /// Of sequences for which the model has `places` left.
    pub(super) fn new(args: &GenerateArgs, places: usize) -> Self {
        let each = u64::from(args.text.max_tokens).min(places as u64);
        let bar = match args.format {
            Format::Text if io::stdout().is_terminal() => ProgressBar::hidden(),
            _ => progress::bar("writing", each * u64::from(args.text.num_sequences)),
        };
        Progress { bar, each }
    }

    /// Writes with the bar out of the way.
    pub(super) fn beside<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }

    /// Moves the bar on; a sequence that has ended has no more to come.
    pub(super) fn tell(&self, sequences: &[Sequence<'_>]) {
        let written = |sequence: &Sequence<'_>| sequence.history.output().len() as u64;
        let most = |sequence: &Sequence<'_>| if sequence.end.is_some() { written(sequence) } else { self.each };
        self.bar.set_length(sequences.iter().map(most).sum());
        self.bar.set_position(sequences.iter().map(written).sum());
    }

    pub(super) fn end(&self) {
        self.bar.finish_and_clear();
    }
}
