//! The inputs of a law: a factory, an effort, and a callback for progress.

use crate::factory::{BuildError, SamplerFactory};
use crate::problem::Problem;
use crate::report::{Broken, ensure};
use crate::shared_reference::{ReferenceResults, SharedReference};
use core::cell::Cell;
use core::fmt;
use flash_sampling_core::reference::ReferenceVariant;
use flash_sampling_core::{Capabilities, DType, Draw, Head, Matrix, PerturbedArgmax, Plan, RowParams, Samples};

/// The amount of work of the statistical laws.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Effort {
    /// A quarter of the draws of `Quick`; the default of tests (see [`suite::effort`](crate::suite::effort)).
    Sample,
    /// Seconds for all laws.
    #[default]
    Quick,
    /// Sixteen times the draws of `Quick`.
    Full,
}

/// A run of laws on one sampler.
#[derive(Clone, Copy)]
pub struct Trial<'a> {
    /// The factory of the samplers.
    pub factory: &'a dyn SamplerFactory,
    /// The amount of work.
    pub effort: Effort,
    /// The callback for the finished part of the current law, from 0 to 1.
    pub progress: &'a dyn Fn(f64),
    /// A flag that a law sets if its number of draws depends on the effort.
    pub depends_on_effort: Option<&'a Cell<bool>>,
    /// Results of the reference that this trial shares with other trials of the program. They stay in memory.
    pub reference_results: Option<&'static ReferenceResults>,
}

impl core::fmt::Debug for Trial<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Trial").field("factory", &self.factory.name()).field("effort", &self.effort).finish()
    }
}

impl<'a> Trial<'a> {
    /// Makes a quick trial without a callback.
    pub fn new(factory: &'a dyn SamplerFactory) -> Self {
        Trial { factory, effort: Effort::Quick, progress: &|_| (), depends_on_effort: None, reference_results: None }
    }

    /// Scales the number of draws `quick` of a quick trial to the effort.
    pub fn draws(&self, quick: usize) -> usize {
        if let Some(depends) = self.depends_on_effort {
            depends.set(true);
        }
        match self.effort {
            Effort::Sample => quick.div_ceil(4),
            Effort::Quick => quick,
            Effort::Full => 16 * quick,
        }
    }

    /// Builds a sampler for a head.
    ///
    /// # Errors
    /// Returns the backend's error.
    pub fn sampler<'w>(&self, head: Head<'w>, plan: Plan) -> Result<Box<dyn PerturbedArgmax + 'w>, BuildError> {
        self.factory.build(head, plan)
    }

    /// Makes the reference that must give the same tokens, if it has the factorisation.
    pub fn reference<'w>(&self, head: Head<'w>, plan: Plan) -> Option<SharedReference<'w>> {
        let variant = self.factory.reference_variant(&head)?;
        Some(SharedReference::new(head, Plan { canonical: false, ..plan }, variant, self.reference_results))
    }

    /// Returns the capabilities of the factory's samplers.
    ///
    /// # Errors
    /// Returns the backend's error.
    pub fn capabilities(&self) -> Result<Capabilities, BuildError> {
        let weight = [0f32; 4];
        let matrix = Matrix::new(&weight, 4, 1).expect("four elements");
        let head = Head::new(matrix).expect("four tokens");
        Ok(self.sampler(head, Plan::default())?.capabilities())
    }

    /// Builds a sampler and makes one call.
    ///
    /// # Errors
    /// Returns an error of the backend or of the call. Errors of rows are in the samples.
    pub fn sample(&self, problem: &Problem, plan: Plan, rows: &[RowParams<'_>]) -> Result<Samples, Broken> {
        let mut out = Samples::new();
        self.sampler(problem.head(), plan)?.sample(problem.input(), rows, &mut out)?;
        Ok(out)
    }

    /// Makes one call of the reference; returns `None` if the reference lacks the factorisation.
    ///
    /// # Errors
    /// Returns an error of the call. Errors of rows are in the samples.
    pub fn expected(&self, problem: &Problem, plan: Plan, rows: &[RowParams<'_>]) -> Result<Option<Samples>, Broken> {
        let Some(mut reference) = self.reference(problem.head(), plan) else { return Ok(None) };
        let mut want = Samples::new();
        reference.sample(problem.input(), rows, &mut want)?;
        Ok(Some(want))
    }

    /// Takes `n` or a few more independent draws from the problem's rows, with different seeds and positions.
    ///
    /// # Errors
    /// Returns an error of the backend or of any row.
    pub fn collect(&self, problem: &Problem, n: usize, seed: u64) -> Result<Vec<Draw>, Broken> {
        let rows = problem.rows();
        let per_row = n.div_ceil(rows);
        let block = per_row.min(256);
        let plan = Plan { max_rows: rows, max_draws: block as u32, ..Plan::default() };
        let mut sampler = self.sampler(problem.head(), plan)?;
        let mut out = Samples::new();
        let mut draws = Vec::with_capacity(n);
        let mut first = 0;
        while first < per_row {
            let count = block.min(per_row - first);
            let params: Vec<RowParams<'_>> = (0..rows as u64)
                .map(|r| RowParams {
                    seed: seed.wrapping_add(r / 3),
                    position: 100 + r % 3,
                    first_draw: first as u32,
                    draws: count as u32,
                    ..RowParams::default()
                })
                .collect();
            sampler.sample(problem.input(), &params, &mut out)?;
            for row in out.iter() {
                draws.extend_from_slice(row?.draws);
            }
            first += count;
            (self.progress)(first as f64 / per_row as f64);
        }
        Ok(draws)
    }
}

/// Makes calls with a problem's rows, and returns all draws in order.
///
/// # Errors
/// Returns an error of a call or of any row.
pub(crate) fn drawn<'r>(
    sampler: &mut dyn PerturbedArgmax,
    problem: &Problem,
    calls: impl IntoIterator<Item = Vec<RowParams<'r>>>,
) -> Result<Vec<Draw>, Broken> {
    let (mut draws, mut out) = (Vec::new(), Samples::new());
    for rows in calls {
        sampler.sample(problem.input().row_range(0..rows.len()), &rows, &mut out)?;
        for row in out.iter() {
            draws.extend_from_slice(row?.draws);
        }
    }
    Ok(draws)
}

/// Returns `count` rows of a call, each like `row` at another position. No two calls share a position.
pub(crate) fn rows_of_call(row: RowParams<'_>, call: u64, count: usize) -> Vec<RowParams<'_>> {
    (0..count as u64).map(|r| RowParams { position: call << 8 | r, ..row }).collect()
}

/// All dtype pairs (weight, hidden), which the laws test.
pub const DTYPES: [(DType, DType); 9] = [
    (DType::BF16, DType::BF16),
    (DType::F32, DType::F32),
    (DType::F16, DType::F16),
    (DType::BF16, DType::F32),
    (DType::F16, DType::F32),
    (DType::F32, DType::BF16),
    (DType::F16, DType::BF16),
    (DType::BF16, DType::F16),
    (DType::F32, DType::F16),
];

/// The bits of a row's result, without masses and kept tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct RowBits {
    outcome: Result<Drawn, flash_sampling_core::RowError>,
}

#[derive(Clone, Debug, PartialEq)]
struct Drawn {
    /// token, score, logit
    draws: Vec<(u32, Bits, Bits)>,
    log_z: Option<Bits>,
    /// token, logit
    top: Vec<(u32, Bits)>,
    /// raw logits of the draws
    raw: Vec<Bits>,
    ranks: Vec<u32>,
    /// token, logit; -0 counts as 0
    tokens: Vec<(u32, Bits)>,
}

/// A float that compares by its bits, and prints its value and bits.
#[derive(Clone, Copy, PartialEq)]
enum Bits {
    F32(u32),
    F64(u64),
}

impl From<f32> for Bits {
    fn from(x: f32) -> Self {
        Bits::F32(x.to_bits())
    }
}

impl From<f64> for Bits {
    fn from(x: f64) -> Self {
        Bits::F64(x.to_bits())
    }
}

impl fmt::Debug for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Bits::F32(bits) => write!(f, "{} ({bits:08x})", f32::from_bits(bits)),
            Bits::F64(bits) => write!(f, "{} ({bits:016x})", f64::from_bits(bits)),
        }
    }
}

impl RowBits {
    /// Returns the bits of a row.
    pub fn of(out: &Samples, row: usize) -> Self {
        let outcome = out.row(row).map(|row| Drawn {
            draws: row.draws.iter().map(|d| (d.token, d.score.into(), d.logit.into())).collect(),
            log_z: row.log_z.map(Bits::from),
            top: row.top.iter().map(|&(token, logit)| (token, logit.into())).collect(),
            raw: row.raw_logits.iter().map(|&logit| logit.into()).collect(),
            ranks: row.ranks.to_vec(),
            tokens: row.token_logits.iter().map(|&(token, logit)| (token, (logit + 0.0).into())).collect(),
        });
        RowBits { outcome }
    }

    /// Returns the bits of every row.
    pub fn all(out: &Samples) -> Vec<Self> {
        (0..out.len()).map(|row| RowBits::of(out, row)).collect()
    }

    /// Stops a law at the first row that differs from the reference's, or if rows are missing.
    ///
    /// # Errors
    /// Names the row, after `what`.
    pub fn same(found: &Samples, want: &Samples, what: impl fmt::Display) -> Result<(), Broken> {
        ensure!(found.len() == want.len(), "{what}: {} rows, the reference has {}", found.len(), want.len());
        for (r, (found, want)) in RowBits::all(found).iter().zip(&RowBits::all(want)).enumerate() {
            ensure!(found == want, "{what}, row {r}: {found:?}, the reference has {want:?}");
        }
        Ok(())
    }
}

/// Returns the groups of a variant over a head's tokens; for a pathwise variant, one group of all tokens.
pub fn groups_of(scheme: &ReferenceVariant, head: &Head<'_>) -> Vec<core::ops::Range<u32>> {
    let tokens = head.tokens();
    match scheme {
        ReferenceVariant::Tiled => vec![tokens],
        ReferenceVariant::Grouped(size) | ReferenceVariant::Online(size) => {
            flash_sampling_core::reference::groups(tokens, *size).map(|(_, range)| range).collect()
        }
        ReferenceVariant::Sharded(starts) => {
            let ends = starts.iter().skip(1).copied().chain([tokens.end]);
            starts.iter().zip(ends).map(|(&a, b)| a..b).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_beside_their_bits() {
        assert_eq!(
            format!("{:?} {:?}", Bits::from(1.25f32), Bits::from(-0.0f64)),
            "1.25 (3fa00000) -0 (8000000000000000)"
        );
        assert_ne!(Bits::from(0.0f32), Bits::from(-0.0f32));
    }
}
