//! The input of a call: packed hidden states, their upper bounds, and the canonical re-evaluation of draws.

use crate::dot::Dot;
use crate::dot::pack::Packed;
use crate::isa::Isa;
use crate::options::Threads;
use crate::scan::canonical::Canonical;
use crate::scan::finish::Summary;
use crate::scan::tile::Source;
use crate::upper_bounds::{BoundsMemory, Digits, UpperBounds};
use flash_sampling_core::backend::{Row, RowSummary};
use flash_sampling_core::{DType, Head, Matrix, Plan};

/// The packed hidden states of a call, and the canonical option. They do not depend on the weight.
#[derive(Debug)]
pub(crate) struct PackedInput {
    packed: Packed,
    /// Upper bounds of logits, and the hidden states in digits.
    bounds: Option<(UpperBounds, Digits)>,
    canonical: Option<Canonical>,
    /// The bytes of some rows of the input.
    gathered: Vec<u8>,
}

impl PackedInput {
    pub(crate) fn new(head: &Head<'_>, plan: &Plan) -> Self {
        PackedInput {
            packed: Packed::new(plan.max_rows, head.hidden()),
            bounds: None,
            canonical: plan.canonical.then(|| Canonical::new(head)),
            gathered: Vec::new(),
        }
    }

    /// Prepares upper bounds, if the head has any.
    pub(crate) fn with_bounds(mut self, head: &Head<'_>, plan: &Plan, isa: Isa, threads: &Threads) -> Self {
        let bounds = UpperBounds::new(head, isa, threads);
        self.bounds = bounds.map(|bounds| {
            let digits = bounds.digits(plan.max_rows, head);
            (bounds, digits)
        });
        self
    }

    /// Removes the upper bounds.
    #[cfg(test)]
    pub(crate) fn without_bounds(&mut self) {
        self.bounds = None;
    }

    /// Whether small calls of the head have upper bounds.
    pub(crate) fn can_have_bounds(&self) -> bool {
        self.bounds.is_some()
    }

    /// Whether calls of this number of rows and draws are faster with upper bounds of this head's logits.
    pub(crate) fn has_bounds(&self, head: &Head<'_>, rows: usize, draws: usize) -> bool {
        self.bounds.as_ref().is_some_and(|(bounds, _)| bounds.is_faster(head, rows, draws))
    }

    /// The memory that a worker needs for upper bounds.
    pub(crate) fn bounds_memory(&self, head: &Head<'_>, max_rows: usize) -> Option<BoundsMemory> {
        self.bounds.as_ref().map(|(bounds, _)| bounds.memory(head, max_rows))
    }

    /// Reserves memory for another number of rows.
    pub(crate) fn replan(&mut self, max_rows: usize) {
        self.packed.replan(max_rows);
        if let Some((_, digits)) = &mut self.bounds {
            digits.replan(max_rows);
        }
    }

    /// Packs all hidden states for a weight's kernel.
    pub(crate) fn pack(&mut self, isa: Isa, weight: DType, input: &Matrix<'_>) -> Dot {
        let dot = Dot::new(isa, weight, input.dtype());
        self.packed.pack(dot.layout(), input);
        dot
    }

    /// Packs some rows of the hidden states, ascending; with `with_bounds`, also in digits. Returns whether all rows have
    /// upper bounds.
    pub(crate) fn pack_rows(
        &mut self,
        isa: Isa,
        head: &Head<'_>,
        input: &Matrix<'_>,
        rows: &[usize],
        with_bounds: bool,
    ) -> (Dot, bool) {
        let mut some = *input;
        let mut gathered = core::mem::take(&mut self.gathered);
        if rows.len() < input.rows() {
            gathered.clear();
            rows.iter().for_each(|&r| gathered.extend_from_slice(input.row_bytes(r)));
            some = Matrix::from_bytes(&gathered, input.dtype(), rows.len(), input.cols(), input.cols())
                .expect("these bytes are whole rows");
        }
        let dot = self.pack(isa, head.weight().dtype(), &some);
        let has_bounds = match &mut self.bounds {
            Some((bounds, digits)) if with_bounds => bounds.pack(head, &some, digits),
            _ => false,
        };
        self.gathered = gathered;
        (dot, has_bounds)
    }

    /// Returns the slack of a row; 0 without the canonical option.
    pub(crate) fn slack(&mut self, head: &Head<'_>, row: &Row<'_>, input: &Matrix<'_>, r: usize) -> f32 {
        self.canonical.as_mut().map_or(0.0, |c| c.slack(head, row, input, r))
    }

    /// The matmul of `head` with these hidden states.
    pub(crate) fn source<'a>(&'a self, head: &'a Head<'a>, dot: Dot) -> Source<'a> {
        Source::Head { head, dot, hidden: &self.packed, bounds: None }
    }

    /// [`PackedInput::source`] with upper bounds of the logits.
    pub(crate) fn source_of_bounds<'a>(&'a self, head: &'a Head<'a>, dot: Dot) -> Source<'a> {
        let bounds = self.bounds.as_ref().map(|(bounds, digits)| (bounds, digits));
        Source::Head { head, dot, hidden: &self.packed, bounds }
    }

    /// Writes the canonical draws and largest logits of row `r` to `out`, which [`RowSummary::begin`] prepared.
    pub(crate) fn write_canonical(
        &mut self,
        head: &Head<'_>,
        row: &Row<'_>,
        input: &Matrix<'_>,
        r: usize,
        summary: &Summary<'_>,
        out: &mut RowSummary,
    ) {
        summary.write(row, out);
        let Some(canonical) = self.canonical.as_mut().filter(|_| !out.draws.is_empty()) else { return };
        canonical.load(input, r);
        let limit = if row.without_replacement { row.draws as usize } else { 1 };
        let copies = if row.greedy && !row.without_replacement { row.draws as usize } else { 1 };
        out.draws.clear();
        out.list.clear();
        for (list, draw) in summary.best.lists().iter().zip(row.first_draw..) {
            let noise = (!row.greedy).then_some(draw);
            let drawn = canonical.resolve(head, row, noise, limit, list.as_slice());
            (0..copies).for_each(|_| out.draws.extend_from_slice(drawn));
        }
        let top = canonical.resolve(head, row, None, row.logprobs.unwrap_or(0) as usize, summary.top);
        out.list.extend_from_slice(top);
    }
}
