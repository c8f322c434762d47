//! Timing in turn, so that what the machine does meanwhile hits every contender alike.

use crate::error::CommandError;
use crate::interrupt::Interrupt;
use indicatif::ProgressBar;
use std::time::Instant;

/// Something to be timed.
pub struct Contender<'a> {
    /// Its name in tables.
    pub name: String,
    /// One run.
    pub run: Box<dyn FnMut() -> Result<(), CommandError> + 'a>,
}

impl std::fmt::Debug for Contender<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Contender").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<'a> Contender<'a> {
    /// A contender.
    pub fn new(name: impl Into<String>, run: impl FnMut() -> Result<(), CommandError> + 'a) -> Self {
        Contender { name: name.into(), run: Box::new(run) }
    }
}

/// The times of one contender, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// The shortest.
    pub best: f64,
    /// The one in the middle.
    pub median: f64,
}

impl Timing {
    /// Of the times of all rounds; one at least.
    pub fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        Timing { best: times[0], median: times[times.len() / 2] }
    }
}

/// Runs every contender once to warm up, then all of them in turn for `rounds` rounds.
pub fn in_turn(
    contenders: &mut [Contender<'_>],
    rounds: usize,
    bar: &ProgressBar,
    interrupt: &Interrupt,
) -> Result<Vec<Timing>, CommandError> {
    let mut times = vec![Vec::with_capacity(rounds); contenders.len()];
    for round in 0..=rounds {
        for (contender, times) in contenders.iter_mut().zip(&mut times) {
            interrupt.check()?;
            let start = Instant::now();
            (contender.run)()?;
            let seconds = start.elapsed().as_secs_f64();
            if round > 0 {
                times.push(seconds);
            }
            bar.inc(1);
        }
    }
    Ok(times.into_iter().map(Timing::of).collect())
}
