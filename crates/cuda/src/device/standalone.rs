//! The standalone sampler over logits in device memory (paper Alg. I.1).
#![allow(unsafe_code)]

use crate::abi::{self, Call, DeviceAddress, Draw, Existing, HeadTransform, Row, SkipIf};
use crate::compile::{Instance, KernelSource, kernels};
use crate::device::{Device, DeviceMatrix, Grid, Kernel, Queue, Scratch, check_aligned, check_rows, entries};
use crate::error::CudaError;
use core::ops::Range;
use cudarc::driver::CudaStream;
use flash_sampling_core::{DType, Knob};
use std::sync::Arc;

/// One instance per logit type, for all GPUs.
pub(crate) static SOURCE: KernelSource = KernelSource {
    file: "standalone.cu",
    serves: kernels::any,
    instances: || [DType::BF16, DType::F16, DType::F32].map(instance).into(),
};

fn instance(dtype: DType) -> Instance {
    Instance::new(&[("ELEMENT", &abi::element_name(dtype))])
}

const THREADS: u32 = 128;
/// Tokens that a warp reads at a time, and warps of a block.
pub(crate) const PART: u32 = 256;
pub(crate) const WARPS: u32 = THREADS / 32;
/// The maximum number of blocks of a launch per multiprocessor.
const BLOCKS: u32 = 8;
/// The maximum number of draws of a launch, and the end of the token ids.
pub(crate) const MAX_DRAWS: usize = 1 << 20;
const MAX_TOKEN: usize = 1 << 31;

/// The number of blocks that share a row, and the number of 256-token parts of each.
pub(crate) fn split(tokens: &Range<u32>, items: usize, multiprocessors: u32) -> (u32, u32) {
    let parts = (tokens.end - 1) / PART + 1 - tokens.start / PART;
    let wanted = ((BLOCKS * multiprocessors) as usize / items.max(1)).max(1) as u32;
    let parts_of_block = parts.div_ceil(wanted).next_multiple_of(WARPS);
    (parts.div_ceil(parts_of_block), parts_of_block)
}

/// The draws of a launch over existing logits.
#[derive(Clone, Copy, Debug)]
pub struct DeviceDraws {
    /// The number of draws.
    pub count: usize,
    /// One [`abi::Row`](crate::abi::Row) per draw.
    pub rows: DeviceAddress<Row>,
    /// The logits row of each draw, one `u32` per draw; `None`: draw `i` uses row `i`.
    pub sources: Option<DeviceAddress<u32>>,
    /// Room for one [`abi::Draw`](crate::abi::Draw) per draw.
    pub draws: DeviceAddress<Draw>,
}

/// A sampler over existing logits in device memory (paper Alg. I.1): one streaming pass, one launch per call.
///
/// It is exact pathwise, with the same draws as [`DeviceTiled`](crate::DeviceTiled) on the same logits. A call uses the
/// caller's stream, allocates nothing and does not wait, so a graph can capture it. The kernel reads positions from
/// device memory when it runs.
///
/// The logits are raw, `[rows, tokens]` in bf16, f16 or f32, with any row stride and address. Rows that begin at
/// multiples of 16 bytes are faster.
#[derive(Debug)]
pub struct DeviceStandalone {
    device: Arc<Device>,
    kernel: Kernel<(Call, Existing)>,
    tokens: Range<u32>,
    dtype: DType,
    max_draws: usize,
    /// Per draw: ordered bits of the best winner, the first invalid logit, and a counter.
    scratch: Scratch,
}

impl DeviceStandalone {
    /// Plans calls of up to `max_draws` draws from the logits of `tokens` (global ids, `0..vocab` without shards):
    /// compiles and loads the kernel, and allocates 20 bytes of scratch per draw.
    ///
    /// # Errors
    /// * [`CudaError::TooLarge`]: token ids above 2^31, or more than 2^20 draws.
    /// * [`CudaError::EmptyPlan`]: no draws.
    /// * [`CudaError::Layout`]: no tokens.
    /// * [`CudaError::Compile`], [`CudaError::Driver`].
    pub fn new(tokens: Range<u32>, dtype: DType, max_draws: usize, device: &Arc<Device>) -> Result<Self, CudaError> {
        if tokens.is_empty() {
            return Err(CudaError::Layout { what: "logits", reason: "they have no tokens" });
        }
        if max_draws == 0 {
            return Err(CudaError::EmptyPlan { knob: Knob::Draws });
        }
        CudaError::check_limits(&[("tokens", tokens.end as usize, MAX_TOKEN), ("draws", max_draws, MAX_DRAWS)])?;
        let kernel = device.function(&SOURCE, &instance(dtype), &entries::STANDALONE)?;
        let keys = 8 * max_draws..16 * max_draws;
        let scratch = Scratch::new(20 * max_draws, &[0..keys.start, keys.end..20 * max_draws], device)?;
        Ok(DeviceStandalone { device: device.clone(), kernel, tokens, dtype, max_draws, scratch })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Records that every launch has run: see [`Scratch::mark_idle`].
    pub(crate) fn mark_idle(&mut self) {
        self.scratch.mark_idle();
    }

    /// Draws from `logits [rows, tokens]`: enqueues one launch on `stream` and returns.
    ///
    /// # Errors
    /// * [`CudaError::Layout`]: the logits have an unsupported type, width, stride or address; without sources, fewer
    ///   rows than draws; the address of rows is not a multiple of 8, or the address of draws or sources not of 4.
    /// * [`CudaError::TooLarge`]: more draws than planned.
    /// * [`CudaError::Driver`].
    ///
    /// # Safety
    /// * `logits`, all memory that `draws` names, and all memory that its rows point to, are device memory of this
    ///   device, of the stated sizes, until the launch has run; the sources are below the number of rows.
    /// * The rows are as [`abi::Row`](crate::abi::Row) states.
    /// * Launches of one planned value follow each other: on one stream, or ordered by events.
    /// * This value outlives the launch, and every launch of a graph that captured it. Dropping this value waits for
    ///   the GPU if launches may be pending, so it is not dropped while a stream of the context captures.
    pub unsafe fn launch(
        &mut self,
        stream: &CudaStream,
        logits: &DeviceMatrix,
        draws: &DeviceDraws,
    ) -> Result<(), CudaError> {
        // SAFETY: the bullets of this function; this value owns the scratch, sized by `new`.
        let queue = unsafe { Queue::new(stream) };
        self.enqueue(queue, logits, draws)
    }

    /// [`DeviceStandalone::launch`].
    pub(crate) fn enqueue(
        &mut self,
        queue: Queue<'_>,
        logits: &DeviceMatrix,
        draws: &DeviceDraws,
    ) -> Result<(), CudaError> {
        let reason = match () {
            () if logits.dtype != self.dtype => "their type is not the planned one",
            () if logits.cols != self.tokens.len() => "their width is not the planned number of tokens",
            () if logits.row_stride < logits.cols => "the stride is smaller than a row",
            () if !logits.address.get().is_multiple_of(self.dtype.block_bytes() as u64) => {
                "their address is not a multiple of an element"
            }
            () if draws.sources.is_none() && logits.rows < draws.count => "there are fewer rows than draws",
            () => "",
        };
        if !reason.is_empty() {
            return Err(CudaError::Layout { what: "logits", reason });
        }
        CudaError::check_limits(&[("draws", draws.count, self.max_draws)])?;
        check_rows(draws.rows, draws.draws)?;
        check_aligned("sources", draws.sources.unwrap_or_default())?;
        if draws.count == 0 {
            return Ok(());
        }
        let (blocks, parts_of_block) = split(&self.tokens, draws.count, self.device.multiprocessors());
        let best = self.scratch.begin_use::<u64>();
        let call = Call {
            rows: draws.rows,
            bias: DeviceAddress::NULL,
            best,
            invalid: best.add(self.max_draws),
            logits: DeviceAddress::NULL,
            arrived: best.add(2 * self.max_draws).cast(),
            draws: draws.draws,
            head: HeadTransform { soft_cap: 0.0, scale: 1.0 },
            row_count: draws.count as u32,
            hidden: 0,
            first_token: self.tokens.start,
            tokens: self.tokens.len() as u32,
            skip_if: SkipIf::default(),
        };
        let existing = Existing {
            logits: logits.address,
            sources: draws.sources.unwrap_or_default(),
            row_stride: logits.row_stride as u64,
            blocks,
            parts_of_block,
        };
        let all = blocks * draws.count as u32;
        queue.launch(&self.kernel, Grid::of(all, THREADS), (call, existing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_every_token_and_launches_stay_small() {
        for tokens in [0..1, 255..257, 0..151_936, 70..128_000, 0..1 << 31] {
            for items in [1, 3, 64, 256, 1 << 20] {
                let (blocks, parts) = split(&tokens, items, 132);
                let needed = (tokens.end - 1) / PART + 1 - tokens.start / PART;
                assert!(u64::from(blocks) * u64::from(parts) >= u64::from(needed), "{tokens:?}, {items}");
                assert!((u64::from(blocks) - 1) * u64::from(parts) < u64::from(needed), "{tokens:?}, {items}");
                assert!(blocks as usize * items <= items.max(BLOCKS as usize * 132), "{tokens:?}, {items}");
            }
        }
    }
}
