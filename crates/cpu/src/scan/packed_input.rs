//! The input of a call: packed hidden states, and the canonical re-evaluation of draws.

use crate::dot::Dot;
use crate::dot::pack::Packed;
use crate::isa::Isa;
use crate::scan::canonical::Canonical;
use crate::scan::finish::Summary;
use crate::scan::tile::Source;
use flash_sampling_core::backend::{Row, RowSummary};
use flash_sampling_core::{DType, Head, Matrix, Plan};

/// The packed hidden states of a call, and the canonical option. They do not depend on the weight.
#[derive(Debug)]
pub(crate) struct PackedInput {
    packed: Packed,
    canonical: Option<Canonical>,
    /// The bytes of some rows of the input.
    gathered: Vec<u8>,
}

impl PackedInput {
    pub(crate) fn new(head: &Head<'_>, plan: &Plan) -> Self {
        PackedInput {
            packed: Packed::new(plan.max_rows, head.hidden(), head.weight().dtype()),
            canonical: plan.canonical.then(|| Canonical::new(head)),
            gathered: Vec::new(),
        }
    }

    /// Reserves memory for another number of rows.
    pub(crate) fn replan(&mut self, max_rows: usize) {
        self.packed.replan(max_rows);
    }

    /// Packs all hidden states for a weight's kernel.
    pub(crate) fn pack(&mut self, isa: Isa, weight: DType, input: &Matrix<'_>) -> Dot {
        let dot = Dot::new(isa, weight, input.dtype(), input.cols());
        self.packed.pack(dot.layout(), input);
        dot
    }

    /// Packs some rows of the hidden states, ascending.
    pub(crate) fn pack_rows(&mut self, isa: Isa, weight: DType, input: &Matrix<'_>, rows: &[usize]) -> Dot {
        if rows.len() == input.rows() {
            return self.pack(isa, weight, input);
        }
        self.gathered.clear();
        rows.iter().for_each(|&r| self.gathered.extend_from_slice(input.row_bytes(r)));
        let some = Matrix::from_bytes(&self.gathered, input.dtype(), rows.len(), input.cols(), input.cols());
        let dot = Dot::new(isa, weight, input.dtype(), input.cols());
        self.packed.pack(dot.layout(), &some.expect("these bytes are whole rows"));
        dot
    }

    /// Returns the slack of a row; 0 without the canonical option.
    pub(crate) fn slack(&mut self, head: &Head<'_>, row: &Row<'_>, input: &Matrix<'_>, r: usize) -> f32 {
        self.canonical.as_mut().map_or(0.0, |c| c.slack(head, row, input, r))
    }

    /// The matmul of `head` with these hidden states.
    pub(crate) fn source<'a>(&'a self, head: &'a Head<'a>, dot: Dot) -> Source<'a> {
        Source::Head { head, dot, hidden: &self.packed }
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
