//! What a law says about a sampler.

use core::fmt;

/// The level of a statistical check: a correct sampler fails one with at most this probability.
///
/// An instance of the suite makes up to 139 such checks and the workspace has 56 instances, 18 of them on GPUs, so by
/// Bonferroni's inequality the family-wise level of a full run is below 0.01. Seeds are fixed: a run that passes, passes
/// again.
pub const ALPHA: f64 = 1e-6;

/// How a check is decided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Criterion {
    /// Passes when the p-value of the statistic is at least alpha.
    PValue {
        /// The probability of a statistic at least as extreme.
        p: f64,
        /// The level of the test.
        alpha: f64,
    },
    /// Passes when the statistic is at most this.
    AtMost(f64),
}

/// One check of a law.
#[derive(Clone, Debug, PartialEq)]
pub struct Check {
    /// What was compared with what.
    pub what: String,
    /// How many draws, rows or numbers went into it.
    pub cases: u64,
    /// The statistic.
    pub statistic: f64,
    /// How it is judged.
    pub criterion: Criterion,
}

impl Check {
    /// Whether the check passes.
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

/// What the points of a [`Series`] are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeriesKind {
    /// `x` = log10 of the upper end of a decade of token probabilities; counts of drawn tokens in it.
    ProbabilityDecades,
    /// `x` = quantile level; score minus log-mass against the standard Gumbel's quantile.
    GumbelQuantiles,
}

/// One point to plot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Where; see [`SeriesKind`].
    pub x: f64,
    /// What the law demands there.
    pub expected: f64,
    /// What was seen.
    pub observed: f64,
}

/// Points to plot: empirical against expected.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// What was drawn from.
    pub name: String,
    /// What the points are.
    pub kind: SeriesKind,
    /// The points, `x` ascending.
    pub points: Vec<Point>,
}

/// All that a law found out about one sampler.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LawReport {
    /// The law's name.
    pub law: &'static str,
    /// The sampler's name.
    pub sampler: String,
    /// The checks, in order.
    pub checks: Vec<Check>,
    /// Points to plot, for the laws that have some.
    pub series: Vec<Series>,
    /// What a reader should know, such as a part that does not apply to this variant.
    pub notes: Vec<String>,
}

impl LawReport {
    /// Records a comparison of `cases` things that all agreed.
    pub fn agreed(&mut self, what: impl Into<String>, cases: usize) {
        self.at_most(what, cases, 0.0, 0.0);
    }

    /// Records a statistic with a limit.
    pub fn at_most(&mut self, what: impl Into<String>, cases: usize, statistic: f64, limit: f64) {
        let criterion = Criterion::AtMost(limit);
        self.checks.push(Check { what: what.into(), cases: cases as u64, statistic, criterion });
    }

    /// Records a statistical test at level [`ALPHA`].
    pub fn p_value(&mut self, what: impl Into<String>, cases: usize, statistic: f64, p: f64) {
        let criterion = Criterion::PValue { p, alpha: ALPHA };
        self.checks.push(Check { what: what.into(), cases: cases as u64, statistic, criterion });
    }

    /// Records a remark.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Whether every check passes.
    pub fn passes(&self) -> bool {
        self.checks.iter().all(Check::passes)
    }

    /// The report of a finished law, or its failure.
    ///
    /// # Errors
    /// When the law stopped early or a check failed.
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

/// A law is broken: by a failed check, or by something that needs no statistics.
#[derive(Clone, Debug, PartialEq)]
pub struct LawFailure {
    /// What went wrong, when it was no check.
    pub reason: Option<String>,
    /// The checks made so far.
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

/// Why a law stops early: the sentence that becomes [`LawFailure::reason`].
#[derive(Clone, Debug, PartialEq)]
pub struct Broken(pub String);

impl<E: core::error::Error> From<E> for Broken {
    fn from(error: E) -> Self {
        Broken(format!("unexpected error: {error}"))
    }
}

/// Stops a law with a sentence unless a condition holds.
macro_rules! ensure {
    ($condition:expr, $($sentence:tt)+) => {
        if !$condition {
            return Err($crate::report::Broken(format!($($sentence)+)));
        }
    };
}
pub(crate) use ensure;
