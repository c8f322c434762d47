//! Draws all rows with one sampler, and writes them batch by batch.

use super::job::Job;
use super::json::write_json;
use super::row::RowOutcome;
use super::source::Source;
use super::text::write_text;
use crate::args::{Format, SampleArgs};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::output::{bar, line};
use flash_sampling::{Head, PerturbedArgmax, Plan};
use indicatif::ProgressBar;
use std::io::Write;
use std::ops::Range;

/// Draws with the sampler that `build` makes. Rank 0 shows a progress bar.
pub(super) fn draw<'s>(
    args: &SampleArgs,
    source: &'s Source,
    build: impl FnOnce(Head<'s>, Plan) -> Result<Box<dyn PerturbedArgmax + 's>, CommandError>,
    (out, rank): (&mut dyn Write, usize),
    interrupt: &Interrupt,
) -> Result<u8, CommandError> {
    let (head, hidden) = (source.head.head()?, source.hidden.matrix()?);
    let vocab_size = head.vocab_size();
    let job = Job::new(args, hidden, vocab_size)?;
    let mut sampler = build(head, job.plan())?;
    source.head.log();
    job.warn(vocab_size);
    tracing::debug!("{:?}", sampler.capabilities());
    let bar = match rank {
        0 => bar("drawing", (0..hidden.rows()).map(|row| u64::from(job.draws(row))).sum()),
        _ => ProgressBar::hidden(),
    };
    let mut failed = 0;
    for batch in job.batches() {
        let outcomes = job.draw(&mut *sampler, batch.clone(), &bar, interrupt)?;
        // Rows and bar may share a terminal.
        failed += bar.suspend(|| write(args, &job, batch, outcomes, out))?;
    }
    bar.finish_and_clear();
    if failed > 0 {
        let have = if failed == 1 { "has" } else { "have" };
        let rows = line::count(hidden.rows(), "row");
        tracing::warn!("{failed} of {rows} {have} no draw: an error stands in place of the draws");
    }
    Ok(u8::from(failed > 0))
}

/// Writes the outcomes of a batch; the result is the number of failed rows.
fn write(
    args: &SampleArgs,
    job: &Job<'_>,
    batch: Range<usize>,
    outcomes: Vec<RowOutcome>,
    out: &mut dyn Write,
) -> Result<usize, CommandError> {
    let mut failed = 0;
    for (row, outcome) in batch.zip(outcomes) {
        failed += usize::from(outcome.is_err());
        let written = match args.format {
            Format::Text => write_text(out, row, &outcome, job.without_replacement(row)),
            Format::Json => write_json(out, row, &outcome),
        };
        written.map_err(CommandError::write("to standard output"))?;
    }
    // Ctrl-C may end a long call, but must not lose finished rows.
    out.flush().map_err(CommandError::write("to standard output"))?;
    Ok(failed)
}
