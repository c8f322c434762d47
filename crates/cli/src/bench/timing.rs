//! Timing in turn, so that other load on the machine affects every contender alike.

use crate::bench::record::{Entry, Section};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::output::{bar, line};
use std::time::Instant;

/// A named piece of work to time.
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
    /// The median.
    pub median: f64,
}

impl Timing {
    /// Summarises the times of at least one round.
    pub fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        Timing { best: times[0], median: times[times.len() / 2] }
    }
}

/// Times contenders and fills their section. Every contender runs once to warm up, then all run in turn, round by round.
pub fn time(
    mut section: Section,
    mut contenders: Vec<Contender<'_>>,
    interrupt: &Interrupt,
) -> Result<Section, CommandError> {
    let bar = bar("timing", ((section.rounds + 1) * contenders.len()) as u64);
    bar.set_message(line::count(section.rows, "row"));
    let mut times = vec![Vec::with_capacity(section.rounds); contenders.len()];
    for round in 0..=section.rounds {
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
    bar.finish_and_clear();
    let entries =
        contenders.into_iter().zip(times).map(|(contender, times)| Entry::new(contender.name, Timing::of(times)));
    section.entries = entries.collect();
    Ok(section)
}
