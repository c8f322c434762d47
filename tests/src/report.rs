//! Reports of laws on a sampler.

use crate::statistics::Outcome;
use core::fmt;

/// The level of a statistical check: a correct sampler fails a check with at most this probability.
///
/// An instance of the suite makes up to 139 such checks, and a run has at most 85 instances. By Bonferroni's inequality
/// the family-wise level of a full run is below 0.02; a test of `controls.rs` counts the instances. Seeds are
/// fixed, so a passing run passes every time.
pub const ALPHA: f64 = 1e-6;

/// The criterion that a check passes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Criterion {
    /// The p-value of the statistic is at least alpha.
    PValue {
        /// The probability of a statistic at least as extreme.
        p: f64,
        /// The level of the test.
        alpha: f64,
    },
    /// The statistic is at most this limit.
    AtMost(f64),
}

/// One check of a law.
#[derive(Clone, Debug, PartialEq)]
pub struct Check {
    /// A description of the comparison.
    pub what: String,
    /// The number of compared draws, rows or values.
    pub cases: u64,
    /// The statistic.
    pub statistic: f64,
    /// The criterion of the statistic.
    pub criterion: Criterion,
}

impl Check {
    /// Returns whether the check passes.
    pub fn passes(&self) -> bool {
        match self.criterion {
            Criterion::PValue { p, alpha } => p >= alpha,
            Criterion::AtMost(limit) => self.statistic <= limit,
        }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.passes() { "pass" } else { "FAIL" };
        write!(f, "{verdict}  {}: {} cases, statistic {:.6}", self.what, self.cases, self.statistic)?;
        match self.criterion {
            Criterion::PValue { p, alpha } => write!(f, ", p {p:.3e}, alpha {alpha:.0e}"),
            Criterion::AtMost(limit) => write!(f, ", at most {limit:.6}"),
        }
    }
}

/// The meaning of the points of a [`Series`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeriesKind {
    /// `x` is log10 of the upper end of a decade of probabilities; values are counts of drawn tokens of the decade.
    ProbabilityDecades,
    /// `x` is a quantile level; values are quantiles of the score minus log-mass, and of the standard Gumbel.
    GumbelQuantiles,
}

/// One point to plot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// The abscissa, as [`SeriesKind`] defines it.
    pub x: f64,
    /// The expected value.
    pub expected: f64,
    /// The observed value.
    pub observed: f64,
}

/// Observed and expected values to plot.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// The name of the distribution.
    pub name: String,
    /// The meaning of the points.
    pub kind: SeriesKind,
    /// The points, `x` ascending.
    pub points: Vec<Point>,
}

/// The results of a law on one sampler.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LawReport {
    /// The name of the law.
    pub law: &'static str,
    /// The name of the sampler.
    pub sampler: String,
    /// The checks, in order.
    pub checks: Vec<Check>,
    /// Points to plot; empty for most laws.
    pub series: Vec<Series>,
    /// Remarks, such as a part that does not apply to the variant.
    pub notes: Vec<String>,
}

impl LawReport {
    /// Records a comparison in which all `cases` agreed.
    pub fn agreed(&mut self, what: impl Into<String>, cases: usize) {
        self.at_most(what, cases, 0.0, 0.0);
    }

    /// Records a statistic with a limit.
    pub fn at_most(&mut self, what: impl Into<String>, cases: usize, statistic: f64, limit: f64) {
        let criterion = Criterion::AtMost(limit);
        self.checks.push(Check { what: what.into(), cases: cases as u64, statistic, criterion });
    }

    /// Records a statistical test at level [`ALPHA`], if it has an outcome. A test of fewer than two bins has none.
    pub fn p_value(&mut self, what: impl Into<String>, cases: usize, outcome: impl Into<Option<Outcome>>) {
        let Some(Outcome { statistic, p }) = outcome.into() else { return };
        let criterion = Criterion::PValue { p, alpha: ALPHA };
        self.checks.push(Check { what: what.into(), cases: cases as u64, statistic, criterion });
    }

    /// Records a remark.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Returns whether every check passes.
    pub fn passes(&self) -> bool {
        self.checks.iter().all(Check::passes)
    }

    /// Returns the report of a finished law, or its failure.
    ///
    /// # Errors
    /// Fails if the law stopped early or a check failed.
    pub fn verdict(self, outcome: Result<(), Broken>) -> Result<LawReport, LawFailure> {
        match outcome {
            Ok(()) if self.passes() => Ok(self),
            outcome => Err(LawFailure { reason: outcome.err().map(|broken| broken.0), report: Box::new(self) }),
        }
    }
}

impl fmt::Display for LawReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} on {}", self.law, self.sampler)?;
        for check in &self.checks {
            writeln!(f, "  {check}")?;
        }
        for note in &self.notes {
            writeln!(f, "  note  {note}")?;
        }
        Ok(())
    }
}

/// A broken law, by a failed check or another failure.
#[derive(Clone, Debug, PartialEq)]
pub struct LawFailure {
    /// The failure, if it is not a failed check.
    pub reason: Option<String>,
    /// The report of the checks up to the failure.
    pub report: Box<LawReport>,
}

impl fmt::Display for LawFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "law broken: {}", self.report)?;
        match &self.reason {
            Some(reason) => write!(f, "  FAIL  {reason}"),
            None => Ok(()),
        }
    }
}

impl core::error::Error for LawFailure {}

/// The reason that stops a law early; becomes [`LawFailure::reason`].
#[derive(Clone, Debug, PartialEq)]
pub struct Broken(pub String);

impl<E: core::error::Error> From<E> for Broken {
    fn from(error: E) -> Self {
        let sources = core::iter::successors(error.source(), |error| error.source());
        let sources: String = sources.map(|source| format!(": {source}")).collect();
        Broken(format!("unexpected error: {error}{sources}"))
    }
}

/// Stops a law with a formatted reason unless a condition holds.
macro_rules! ensure {
    ($condition:expr, $($sentence:tt)+) => {
        if !$condition {
            return Err($crate::report::Broken(format!($($sentence)+)));
        }
    };
}
pub(crate) use ensure;
