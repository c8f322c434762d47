//! The two launches of the variants with groups, over a head or one of its parts.

use crate::abi::{Call, DeviceAddress, Draw, Groups, Matrices, PARTIAL_BYTES, Row, Selection, SkipIf, Summaries};
use crate::device::select::SelectKernel;
use crate::device::{
    Device, DeviceHead, DeviceMatrix, Epilogue, GroupRule, LoadedPortable, Portable, PortableOutput, Products, Queue,
    Scratch, check_aligned, check_rows,
};
use crate::error::CudaError;
use std::sync::Arc;

/// Group sizes are multiples of this many tokens.
const GROUP_UNIT: u32 = 64;

/// Checks the size of groups.
///
/// # Errors
/// [`CudaError::GroupSize`].
pub(crate) fn check_group(size: u32) -> Result<(), CudaError> {
    if size == 0 || !size.is_multiple_of(GROUP_UNIT) { Err(CudaError::GroupSize { size }) } else { Ok(()) }
}

/// Bytes of a row's partial summaries: one per group, one more if the first token is within a group, and one per block.
fn partial_bytes_of_row(tokens: usize, size: u32, blocks: u32) -> usize {
    (tokens.div_ceil(size as usize) + 1 + blocks as usize) * PARTIAL_BYTES
}

/// The device addresses of a pass's rows and results, and the position of its part of the head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Results {
    pub(crate) rows: DeviceAddress<Row>,
    pub(crate) draws: DeviceAddress<Draw>,
    /// Null = not requested.
    pub(crate) log_z: DeviceAddress<f64>,
    /// All ones before the first part.
    pub(crate) invalid: DeviceAddress<u64>,
    /// Unused if one part is the whole head.
    pub(crate) running: DeviceAddress<u8>,
    pub(crate) begins: bool,
    pub(crate) ends: bool,
}

/// The two launches over a head, or over parts of a head in ascending order.
#[derive(Debug)]
pub(crate) struct GroupPass {
    device: Arc<Device>,
    size: u32,
    rule: GroupRule,
    max_rows: usize,
    blocks: u32,
    select: SelectKernel,
    /// The portable kernels that are planned or were used.
    portable: Vec<Arc<LoadedPortable>>,
    partials: Scratch,
}

impl GroupPass {
    /// Plans for heads like this one, with at most as many tokens, anywhere in the vocabulary.
    pub(crate) fn new(
        head: &DeviceHead,
        max_rows: usize,
        size: u32,
        rule: GroupRule,
        device: &Arc<Device>,
    ) -> Result<Self, CudaError> {
        check_group(size)?;
        head.check(max_rows, device)?;
        let planned = Portable::up_to(max_rows, Products::planned(head), Epilogue::Summary);
        let portable = planned.map(|instance| device.portable(instance)).collect::<Result<Vec<_>, _>>()?;
        let most = portable.iter().map(|kernel| kernel.blocks(head.weight.rows as u32)).max();
        let blocks = most.unwrap_or(device.multiprocessors());
        // All bytes are ones, NaN, so that a read of unwritten partials shows.
        let bytes = max_rows * partial_bytes_of_row(head.weight.rows, size, blocks);
        let partials = Scratch::new(bytes, &[], device)?;
        let (device, select) = (device.clone(), SelectKernel::load(device)?);
        Ok(GroupPass { device, size, rule, max_rows, blocks, select, portable, partials })
    }

    /// Records that every launch has run: see [`Scratch::mark_idle`].
    pub(crate) fn mark_idle(&mut self) {
        self.partials.mark_idle();
    }

    /// Enqueues both launches over `head`, which has at most the planned number of tokens. Parts come in ascending
    /// order; all but the first begin at multiples of the group size.
    pub(crate) fn launch(
        &mut self,
        queue: Queue<'_>,
        head: &DeviceHead,
        hidden: &DeviceMatrix,
        results: &Results,
    ) -> Result<(), CudaError> {
        check_rows(results.rows, results.draws)?;
        check_aligned("log Z", results.log_z)?;
        if !head.check_hidden(hidden, self.max_rows)? {
            return Ok(());
        }
        let instance = Portable::for_rows(hidden.rows, Products::of(head, hidden.dtype), Epilogue::Summary);
        let kernel = LoadedPortable::of(&mut self.portable, instance, &self.device)?;
        let (tokens, first_token, row_count) = (head.weight.rows as u32, head.first_token, hidden.rows as u32);
        let groups = Groups { size: self.size, first_token, tokens, blocks: kernel.blocks(tokens).min(self.blocks) };
        let partials = self.partials.begin_use();
        let summaries = Summaries { partials, size: self.size, slots: groups.slots() };
        let call = Call {
            rows: results.rows,
            bias: head.bias.unwrap_or_default(),
            best: DeviceAddress::NULL,
            invalid: results.invalid,
            logits: DeviceAddress::NULL,
            arrived: DeviceAddress::NULL,
            draws: DeviceAddress::NULL,
            head: head.transform(),
            row_count,
            hidden: hidden.cols as u32,
            first_token,
            tokens,
            skip_if: SkipIf::default(),
        };
        let selection = Selection {
            rows: results.rows,
            partials,
            running: results.running,
            invalid: results.invalid,
            draws: results.draws,
            log_z: results.log_z,
            groups,
            row_count,
            rule: self.rule as u32,
            begins: results.begins.into(),
            ends: results.ends.into(),
        };
        let matrices = Matrices::of(&head.weight, head.weight_scales(), hidden, 16);
        kernel.launch(queue, call, matrices, PortableOutput::Summary(summaries), groups.blocks)?;
        self.select.launch(queue, selection)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flash_sampling_core::backend::group_size;

    #[test]
    fn groups_of_the_default_size_take_less_than_a_mebibyte_for_a_hundred_rows() {
        for tokens in [1, 128_256, 151_936, 153_601, 201_088, 262_144, 1 << 26] {
            let size = group_size(tokens);
            assert_eq!(check_group(size), Ok(()));
            let bytes = 100 * partial_bytes_of_row(tokens, size, 132);
            assert!(bytes < 1 << 20, "{tokens} tokens in groups of {size}: {bytes} bytes");
        }
        assert_eq!([128_256, 151_936, 201_088].map(group_size), [512, 512, 1024]);
    }
}
