//! Heads larger than device memory: blocks of the weight come from the host while others are multiplied (paper Alg. I.3).
#![allow(unsafe_code)]

use crate::abi::{Draw, RUNNING_BYTES, Row};
use crate::device::fused_hopper::MAX_ROWS;
use crate::device::gpu::Device;
use crate::device::group_pass::{GroupPass, Results, check_group};
use crate::device::head::DeviceHead;
use crate::device::matrix::DeviceMatrix;
use crate::device::scratch::wait;
use crate::device::select::GroupRule;
use crate::error::CudaError;
use crate::host::frame::push_row;
use crate::host::grouped::in_distribution;
use crate::host::staging::Staging;
use crate::host::tiled::CudaTiled;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr, PinnedHostSlice, result};
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{
    Adjustments, Capabilities, Knob, Knobs, Matrix, Plan, RowParams, SampleError, Samples, Shape, StreamError,
    StreamHead, Variant,
};
use std::io::Read;
use std::sync::Arc;

/// Tokens of a group of the tiled variant, whose draws do not depend on it.
const TILED_GROUP: u32 = 1024;
/// The most draws of a call: rows times draws of a row. No buffer's size overflows below it.
const MAX_DRAWS: usize = u32::MAX as usize;

/// Draws over a reader that yields the weight, row-major and in native byte order: a head larger than device memory. Two
/// blocks of the weight are on the GPU, and two beside them in host memory that the GPU copies from: while one block is
/// multiplied the next is copied and the one after is read.
///
/// [`CudaStreamed::online`] keeps of each draw one log-mass and one sample between blocks (paper Alg. I.3), exact in
/// distribution: the draws are those of [`CudaOnline`](crate::CudaOnline). [`CudaStreamed::tiled`] keeps the winner, exact
/// pathwise: the draws are those of [`CudaTiled`].
///
/// Log-probabilities are refused.
#[derive(Debug)]
pub struct CudaStreamed<'a> {
    head: StreamHead<'a>,
    plan: Plan,
    can: Capabilities,
    /// Multiplies; the other copies.
    stream: Arc<CudaStream>,
    copies: Arc<CudaStream>,
    pass: GroupPass,
    /// Tokens of a block: whole groups.
    tokens: usize,
    blocks: [Block; 2],
    bias: Option<CudaSlice<f32>>,
    staging: Staging,
    inputs: CudaSlice<u8>,
    /// Of each draw: what is known of it, its first invalid logit, its result.
    running: CudaSlice<u8>,
    invalid: CudaSlice<u64>,
    draws: CudaSlice<u8>,
    /// Row and number of each draw of the call, and the results.
    work: Vec<(usize, u32)>,
    /// The biases of the call's rows.
    adjustments: Adjustments,
    results: Vec<Draw>,
}

/// A block of the weight on its way.
#[derive(Debug)]
struct Block {
    pinned: PinnedHostSlice<u8>,
    weight: CudaSlice<u8>,
    /// The weight is there; the weight is no longer needed.
    copied: CudaEvent,
    used: CudaEvent,
}

impl Block {
    fn new(bytes: usize, device: &Device, stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        let failed = CudaError::driver("allocate a block of the weight");
        let context = device.context();
        // SAFETY: it is filled before anything reads it.
        let mut pinned = unsafe { context.alloc_pinned_with_flags::<u8>(bytes, 0) }.map_err(&failed)?;
        pinned.as_mut_slice().map_err(&failed)?.fill(0);
        let weight = stream.alloc_zeros(bytes).map_err(&failed)?;
        let event = || context.new_event(None).map_err(&failed);
        Ok(Block { pinned, weight, copied: event()?, used: event()? })
    }
}

impl<'a> CudaStreamed<'a> {
    /// Plans the online variant with groups of `group` tokens. A block has as many whole groups as `block_bytes` hold, and
    /// one at least.
    ///
    /// # Errors
    /// * [`CudaError::GroupSize`]: `group` is not a positive multiple of 64.
    /// * [`CudaError::Head`]: the head's shape or transforms cannot be used.
    /// * [`CudaError::Unsupported`]: a canonical plan, or one with log-probabilities.
    /// * [`CudaError::TooLarge`]: also more than 2^32 - 1 draws of a call.
    /// * Those of [`CudaTiled::new`].
    pub fn online(
        head: StreamHead<'a>,
        plan: Plan,
        group: u32,
        block_bytes: usize,
        device: &Arc<Device>,
    ) -> Result<Self, CudaError> {
        let can = in_distribution(Capabilities { variant: Variant::Online, ..CudaTiled::CAPABILITIES });
        CudaStreamed::new(head, plan, (group, GroupRule::Online), block_bytes, can, device)
    }

    /// Plans the tiled variant; the rest is as [`CudaStreamed::online`] has it.
    ///
    /// # Errors
    /// Those of [`CudaStreamed::online`].
    pub fn tiled(
        head: StreamHead<'a>,
        plan: Plan,
        block_bytes: usize,
        device: &Arc<Device>,
    ) -> Result<Self, CudaError> {
        let knobs = Knobs::ADJUSTMENTS;
        let can = Capabilities { knobs, without_replacement: false, canonical: false, ..CudaTiled::CAPABILITIES };
        CudaStreamed::new(head, plan, (TILED_GROUP, GroupRule::Maxima), block_bytes, can, device)
    }

    fn new(
        head: StreamHead<'a>,
        plan: Plan,
        (group, rule): (u32, GroupRule),
        block_bytes: usize,
        can: Capabilities,
        device: &Arc<Device>,
    ) -> Result<Self, CudaError> {
        check_group(group)?;
        head.check()?;
        let refused = [(plan.canonical, Knob::Canonical), (plan.max_logprobs.is_some(), Knob::Logprobs)];
        if let Some(&(_, knob)) = refused.iter().find(|(refused, _)| *refused) {
            return Err(CudaError::Unsupported { knob });
        }
        let empty = [(plan.max_rows == 0, Knob::MaxRows), (plan.max_draws == 0, Knob::Draws)];
        if let Some(&(_, knob)) = empty.iter().find(|(empty, _)| *empty) {
            return Err(CudaError::EmptyPlan { knob });
        }
        let most = plan.max_rows.saturating_mul(plan.max_draws as usize);
        if most > MAX_DRAWS {
            return Err(CudaError::TooLarge { what: "draws", found: most, limit: MAX_DRAWS });
        }
        let (stream, copies) = (device.stream()?, device.stream()?);
        let row_bytes = head.hidden * head.dtype.size();
        let groups = (block_bytes / row_bytes / group as usize).clamp(1, head.vocab_size.div_ceil(group as usize));
        let tokens = (groups * group as usize).min(head.vocab_size);
        let blocks =
            [Block::new(tokens * row_bytes, device, &stream)?, Block::new(tokens * row_bytes, device, &stream)?];
        let failed = CudaError::driver("allocate what a call needs");
        let bias = head.bias.map(|bias| stream.clone_htod(&bias[..head.vocab_size])).transpose().map_err(&failed)?;
        let first = DeviceHead {
            weight: DeviceMatrix {
                address: blocks[0].weight.device_ptr(&stream).0,
                dtype: head.dtype,
                rows: tokens,
                cols: head.hidden,
                row_stride: head.hidden,
            },
            first_token: 0,
            bias: None,
            soft_cap: head.soft_cap,
            scale: head.scale,
        };
        let pass = GroupPass::new(&first, most.min(MAX_ROWS), group, rule, device)?;
        let inputs = stream.alloc_zeros(most * size_of::<Row>()).map_err(&failed)?;
        let running = stream.alloc_zeros(most * RUNNING_BYTES).map_err(&failed)?;
        let invalid = stream.alloc_zeros(most).map_err(&failed)?;
        let draws = stream.alloc_zeros(most * size_of::<Draw>()).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        let (staging, work, results) = (Staging::default(), Vec::new(), Vec::new());
        Ok(CudaStreamed {
            head,
            plan,
            can,
            stream,
            copies,
            pass,
            tokens,
            blocks,
            bias,
            staging,
            inputs,
            running,
            invalid,
            draws,
            work,
            adjustments: Adjustments::default(),
            results,
        })
    }

    /// What this sampler can do.
    pub fn capabilities(&self) -> Capabilities {
        self.can
    }

    /// The size of its head.
    pub fn shape(&self) -> Shape {
        let tokens = self.head.vocab_size as u32;
        Shape { tokens: 0..tokens, vocab_size: tokens, input: self.head.hidden }
    }

    /// Tokens of a block of the weight.
    pub fn block_tokens(&self) -> usize {
        self.tokens
    }

    /// Draws for `input [rows, hidden]`, reading the weight once, in order, from `weight`.
    ///
    /// # Errors
    /// [`StreamError::Read`] when the reader fails or ends early; [`StreamError::Call`] for what is wrong with the call.
    pub fn sample(
        &mut self,
        weight: &mut impl Read,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), StreamError> {
        out.clear();
        check_call(&input, rows, &self.shape(), &self.plan)?;
        let (can, plan, vocab_size) = (self.can, self.plan, self.head.vocab_size as u32);
        self.work.clear();
        self.staging.clear();
        self.adjustments.collect(rows);
        let stride = self.head.hidden.next_multiple_of(8);
        for (r, params) in rows.iter().enumerate() {
            let Ok(row) = params.check(self.adjustments.row(r), &can, &plan, vocab_size) else { continue };
            for draw in row.first_draw..row.first_draw + row.draws {
                self.work.push((r, draw));
                self.staging.push_hidden(input.row_bytes(r), stride * input.dtype().size());
                self.staging.push(params.seed, params.position, &row, draw, vocab_size);
            }
        }
        let failed = |error| SampleError::Backend { backend: "cuda", source: Box::new(error) };
        self.results.clear();
        if !self.work.is_empty() {
            let hidden = self.begin(&input, stride).map_err(failed)?;
            for (i, start) in (0..self.head.vocab_size).step_by(self.tokens).enumerate() {
                let count = self.tokens.min(self.head.vocab_size - start);
                let bytes = self.pinned(i % 2, count).map_err(failed)?;
                weight.read_exact(bytes).map_err(|source| StreamError::Read { token: start, source })?;
                self.multiply(i % 2, start, count, &hidden).map_err(failed)?;
            }
            self.end().map_err(failed)?;
        }
        let mut results = self.results.as_slice();
        for params in rows {
            let outcome =
                params.check(&[], &can, &plan, vocab_size).and_then(|row| push_row(&mut results, &row, None, &[], out));
            if let Err(error) = outcome {
                out.push_error(error);
            }
        }
        Ok(())
    }

    /// Copies the rows of a call up. Returns their hidden states.
    fn begin(&mut self, input: &Matrix<'_>, row_stride: usize) -> Result<DeviceMatrix, CudaError> {
        let failed = CudaError::driver("copy the inputs of a call");
        // A call that failed may have left work behind.
        self.copies.synchronize().map_err(&failed)?;
        self.stream.synchronize().map_err(&failed)?;
        if self.staging.len() > self.inputs.len() {
            self.inputs = self.stream.alloc_zeros(self.staging.len().next_power_of_two()).map_err(&failed)?;
        }
        let address = self.inputs.device_ptr(&self.stream).0;
        self.stream.memcpy_htod(self.staging.finish(address), &mut self.inputs).map_err(&failed)?;
        let (invalid, bytes) = (self.invalid.device_ptr(&self.stream).0, self.invalid.len() * size_of::<u64>());
        // SAFETY: this is the whole of the invalid keys.
        unsafe { result::memset_d8_async(invalid, 0xff, bytes, self.stream.cu_stream()) }.map_err(&failed)?;
        Ok(DeviceMatrix { address, dtype: input.dtype(), rows: self.work.len(), cols: input.cols(), row_stride })
    }

    /// Where the next `count` rows of the weight are to be read to; waits until they may be.
    fn pinned(&mut self, at: usize, count: usize) -> Result<&mut [u8], CudaError> {
        let failed = CudaError::driver("wait for the copy of a block");
        let block = &mut self.blocks[at];
        block.copied.synchronize().map_err(&failed)?;
        Ok(&mut block.pinned.as_mut_slice().map_err(&failed)?[..count * self.head.hidden * self.head.dtype.size()])
    }

    /// Enqueues the copy of a block that was read, and its launches.
    fn multiply(&mut self, at: usize, start: usize, count: usize, hidden: &DeviceMatrix) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy a block of the weight");
        let block = &mut self.blocks[at];
        self.copies.wait(&block.used).map_err(&failed)?;
        let bytes = count * self.head.hidden * self.head.dtype.size();
        // The events below tell when the pinned memory may be written again; dropping this value waits for the copy.
        let read = &block.pinned.as_slice().map_err(&failed)?[..bytes];
        self.copies.memcpy_htod(read, &mut block.weight.slice_mut(..bytes)).map_err(&failed)?;
        block.copied.record(&self.copies).map_err(&failed)?;
        self.stream.wait(&block.copied).map_err(&failed)?;
        let address = |slice: &CudaSlice<u8>| slice.device_ptr(slice.stream()).0;
        let head = DeviceHead {
            weight: DeviceMatrix {
                address: address(&block.weight),
                dtype: self.head.dtype,
                rows: count,
                cols: self.head.hidden,
                row_stride: self.head.hidden,
            },
            first_token: start as u32,
            bias: self.bias.as_ref().map(|bias| bias.device_ptr(&self.stream).0 + 4 * start as u64),
            soft_cap: self.head.soft_cap,
            scale: self.head.scale,
        };
        let (inputs, running, draws) = (address(&self.inputs), address(&self.running), address(&self.draws));
        let invalid = self.invalid.device_ptr(&self.stream).0;
        let rows_at = inputs + self.staging.rows_at() as u64;
        for first in (0..hidden.rows).step_by(MAX_ROWS) {
            let rows = MAX_ROWS.min(hidden.rows - first);
            let part = DeviceMatrix { address: inputs + first as u64 * hidden.stride_bytes(), rows, ..*hidden };
            let results = Results {
                rows: rows_at + (first * size_of::<Row>()) as u64,
                draws: draws + (first * size_of::<Draw>()) as u64,
                log_z: 0,
                invalid: invalid + (first * size_of::<u64>()) as u64,
                running: running + (first * RUNNING_BYTES) as u64,
                begins: start == 0,
                ends: start + count == self.head.vocab_size,
            };
            // SAFETY: everything is this value's, with room for every draw of the plan; the block is on the device when the
            // stream gets here, and is not written before the event below; parts come in ascending order.
            unsafe { self.pass.launch(&self.stream, &head, &part, &results) }?;
        }
        block.used.record(&self.stream).map_err(&failed)
    }

    /// Copies the draws down, and waits.
    fn end(&mut self) -> Result<(), CudaError> {
        self.results.resize(self.work.len(), Draw::default());
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.results);
        let there = self.draws.slice(..bytes.len());
        self.stream.memcpy_dtoh(&there, bytes).map_err(CudaError::driver("copy the draws"))?;
        self.stream.synchronize().map_err(CudaError::driver("run the kernels"))?;
        self.pass.settle();
        Ok(())
    }
}

impl Drop for CudaStreamed<'_> {
    /// Waits for what a call that failed left behind: it uses this value's memory.
    fn drop(&mut self) {
        let copied = wait(self.copies.context(), || self.copies.synchronize());
        if copied && wait(self.stream.context(), || self.stream.synchronize()) {
            self.pass.settle();
        }
    }
}
