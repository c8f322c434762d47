//! The online variant over a head that does not fit in memory.

use crate::error::CpuError;
use crate::options::CpuOptions;
use crate::variants::group_sequence::GroupSequence;
use flash_sampling_core::backend::check_call;
use flash_sampling_core::{Description, Matrix, Plan, RowParams, SampleError, Samples, Shape, StreamError, StreamHead};
use std::io::Read;

/// The online variant (paper Alg. I.3) over a reader, for a head larger than memory.
///
/// The reader yields the weight, row-major and in native byte order. The sampler holds two groups of weight rows, and
/// reads one while it multiplies the other. It draws as [`Online`](crate::Online) does with equal groups.
#[derive(Debug)]
pub struct OnlineStream<'a> {
    head: StreamHead<'a>,
    groups: GroupSequence,
    blocks: [Vec<u8>; 2],
}

impl<'a> OnlineStream<'a> {
    /// Plans a sampler with groups of `group` tokens.
    ///
    /// # Errors
    /// * [`CpuError::Head`]: the head's shape or transforms cannot be used.
    /// * Errors of [`Online::new`](crate::Online::new).
    pub fn new(head: StreamHead<'a>, plan: Plan, group: u32, options: &CpuOptions) -> Result<Self, CpuError> {
        head.check()?;
        let nothing = Matrix::from_bytes(&[], head.dtype, 0, head.hidden, head.hidden)?;
        let unbiased = StreamHead { bias: None, ..head };
        let groups = GroupSequence::new(&unbiased.part(nothing, head.vocab)?, plan, group, options)?;
        let bytes = (group as usize).min(head.vocab) * nothing.row_stride_bytes();
        Ok(OnlineStream { head, groups, blocks: [vec![0; bytes], vec![0; bytes]] })
    }

    /// What this sampler supports, its size, and its plan.
    pub fn description(&self) -> Description {
        self.groups.description(Shape::whole(self.head.vocab_size as u32, self.head.hidden))
    }

    /// Draws for `input [rows, hidden]`, reading the weight once, in order, from `weight`.
    ///
    /// # Errors
    /// [`StreamError::Read`] if the reader fails or ends early; [`StreamError::Call`] for an error of the call.
    pub fn sample(
        &mut self,
        weight: &mut (impl Read + Send),
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), StreamError> {
        out.clear();
        let of = self.description();
        check_call(&input, rows, &of.shape, &of.plan)?;
        let OnlineStream { head, groups, blocks } = self;
        let (row_bytes, size) = (head.row_bytes(), groups.group as usize);
        let [current, next] = blocks;
        let read = |weight: &mut (dyn Read + Send), start: usize, block: &mut Vec<u8>| {
            let rows = size.min(head.vocab_size.saturating_sub(start));
            weight
                .read_exact(&mut block[..rows * row_bytes])
                .map_err(|source| StreamError::Read { token: start, source })
        };
        let is_parallel = groups.is_parallel();
        groups.sample(&of, input, rows, out, |merge| {
            read(weight, 0, current)?;
            for start in (0..head.vocab_size).step_by(size) {
                let count = size.min(head.vocab_size - start);
                let bytes = &current[..count * row_bytes];
                let part = Matrix::from_bytes(bytes, head.dtype, count, head.hidden, head.hidden)
                    .and_then(|matrix| head.part(matrix, start))
                    .map_err(|source| SampleError::Backend { backend: "cpu", source: Box::new(source) })?;
                let tokens = start as u32..(start + count) as u32;
                if is_parallel {
                    rayon::join(|| read(weight, start + size, next), || merge(tokens, &part)).0?;
                } else {
                    merge(tokens, &part);
                    read(weight, start + size, next)?;
                }
                core::mem::swap(current, next);
            }
            Ok(())
        })
    }
}
