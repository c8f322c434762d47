//! The input of a call: packed hidden states, and the draws that are evaluated anew from them.

use crate::dot::Dot;
use crate::dot::pack::Packed;
use crate::scan::canonical::Canonical;
use crate::scan::engine::Engine;
use crate::scan::finish::Summary;
use crate::scan::tile::Source;
use flash_sampling_core::params::Row;
use flash_sampling_core::{Candidate, DType, Head, Matrix, Plan, RowError, Samples};

/// What is left of a head's input when the weight is set aside: packed hidden states and the canonical option.
#[derive(Debug)]
pub(crate) struct PackedInput {
    packed: Packed,
    canonical: Option<Canonical>,
    /// The canonical draws of a row.
    drawn: Vec<Candidate>,
    /// The bytes of some rows of the input.
    gathered: Vec<u8>,
}

impl PackedInput {
    pub(crate) fn new(head: &Head<'_>, plan: &Plan) -> Self {
        PackedInput {
            packed: Packed::new(plan.max_rows, head.hidden()),
            canonical: plan.canonical.then(|| Canonical::new(head)),
            drawn: Vec::new(),
            gathered: Vec::new(),
        }
    }

    /// Packs the hidden states for a weight's kernel.
    pub(crate) fn pack(&mut self, engine: &Engine, weight: DType, input: &Matrix<'_>) -> Dot {
        let dot = Dot::new(engine.isa, weight, input.dtype());
        self.restore(dot, input);
        dot
    }

    /// Packs them again, after [`PackedInput::gather`].
    pub(crate) fn restore(&mut self, dot: Dot, input: &Matrix<'_>) {
        self.packed.pack(dot.layout(), input);
    }

    /// Packs some rows of the hidden states alone, for the kernel that the whole was packed for.
    pub(crate) fn gather(&mut self, dot: Dot, input: &Matrix<'_>, rows: &[usize]) {
        self.gathered.clear();
        rows.iter().for_each(|&r| self.gathered.extend_from_slice(input.row_bytes(r)));
        let some = Matrix::from_bytes(&self.gathered, input.dtype(), rows.len(), input.cols(), input.cols());
        self.packed.pack(dot.layout(), &some.expect("these bytes are whole rows"));
    }

    /// The slack of a row, 0 without the canonical option.
    pub(crate) fn slack(&mut self, head: &Head<'_>, row: &Row<'_>, input: &Matrix<'_>, r: usize) -> f32 {
        self.canonical.as_mut().map_or(0.0, |c| c.slack(head, row, input, r))
    }

    /// The matmul of `head` with these hidden states.
    pub(crate) fn source<'a>(&'a self, head: &'a Head<'a>, dot: Dot) -> Source<'a> {
        Source::Head { head, dot, hidden: &self.packed }
    }

    /// Appends the result of row `r` to `out`.
    pub(crate) fn emit(
        &mut self,
        head: &Head<'_>,
        row: &Row<'_>,
        input: &Matrix<'_>,
        r: usize,
        summary: &Summary<'_>,
        out: &mut Samples,
    ) -> Result<(), RowError> {
        let Some(canonical) = &mut self.canonical else { return summary.emit(row, out) };
        summary.check(row)?;
        canonical.load(input, r);
        let limit = if row.without_replacement { row.draws as usize } else { 1 };
        let mut drawn = core::mem::take(&mut self.drawn);
        drawn.clear();
        for (list, draw) in summary.best.lists().iter().zip(row.first_draw..) {
            let noise = (!row.greedy).then_some(draw);
            drawn.extend_from_slice(canonical.resolve(head, row, noise, limit, list.as_slice()));
        }
        let top = canonical.resolve(head, row, None, row.logprobs.unwrap_or(0) as usize, summary.top);
        let copies = if row.greedy && !row.without_replacement { row.draws as usize } else { 1 };
        let draws = drawn.iter().copied().cycle().take(drawn.len() * copies);
        out.push_row(draws, row.logprobs.and(summary.mass), top);
        self.drawn = drawn;
        Ok(())
    }
}
