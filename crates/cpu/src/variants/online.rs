//! The online variant (paper Alg. I.3): groups stream through the binary merge.

use crate::error::CpuError;
use crate::options::CpuOptions;
use crate::variants::group_sequence::GroupSequence;
use flash_sampling_core::backend::check_call;
use flash_sampling_core::reference::groups;
use flash_sampling_core::{Description, Head, Matrix, PerturbedArgmax, Plan, RowParams, SampleError, Samples, Shape};

/// The online sampler: consecutive groups of tokens, merged by a coin (paper Alg. I.3). Exact in distribution.
///
/// Groups are on the absolute grid of multiples of their size. The local sample is drawn in the same pass as the
/// log-mass, but in the paper after the coin. Noise is a pure function, so it is the same token, and no logits are
/// stored.
#[derive(Debug)]
pub struct Online<'w> {
    head: Head<'w>,
    groups: GroupSequence,
}

impl<'w> Online<'w> {
    /// Plans a sampler with groups of `group` tokens.
    ///
    /// # Errors
    /// * [`CpuError::GroupSize`]: `group` is not a positive multiple of 64.
    /// * [`CpuError::Unsupported`]: [`Plan::canonical`], because this variant is not pathwise.
    /// * Errors of [`Tiled::new`](crate::Tiled::new).
    pub fn new(head: Head<'w>, plan: Plan, group: u32, options: &CpuOptions) -> Result<Self, CpuError> {
        Ok(Online { groups: GroupSequence::new(&head, plan, group, options)?, head })
    }
}

impl PerturbedArgmax for Online<'_> {
    fn description(&self) -> Description {
        self.groups.description(Shape::of(&self.head))
    }

    fn sample(&mut self, input: Matrix<'_>, rows: &[RowParams<'_>], out: &mut Samples) -> Result<(), SampleError> {
        out.clear();
        let of = self.description();
        check_call(&input, rows, &of.shape, &of.plan)?;
        let (head, group) = (&self.head, self.groups.group);
        self.groups.sample(&of, input, rows, out, |merge| {
            groups(head.tokens(), group).for_each(|(_, tokens)| merge(tokens, head));
            Ok(())
        })
    }

    fn replan(&mut self, max_rows: usize) -> Result<(), SampleError> {
        self.groups.replan(max_rows)
    }
}
