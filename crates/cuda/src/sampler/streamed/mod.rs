//! Samplers for heads larger than device memory: the host streams blocks of the weight during the multiplication (paper
//! Alg. I.3).
//!
//! `call` has the steps of a call, `blocks` moves the weight, `draw_schedule` assigns draws to launches, and `logprobs`
//! has the rows with log-probabilities.

mod blocks;
mod call;
mod draw_schedule;
mod logprobs;

use crate::abi::{self, DeviceAddress, Draw, RUNNING_BYTES, status};
use crate::device::group_pass::{GroupPass, check_group};
use crate::device::{Device, DeviceHead, DeviceMatrix, GroupRule, MAX_ROWS, wait};
use crate::error::CudaError;
use crate::sampler::grouped::in_distribution;
use crate::sampler::row_scan::candidate;
use crate::sampler::{CallRows, CudaTiled, Staging, check_plan, row_stride};
use blocks::Blocks;
use core::mem::take;
use cudarc::driver::{CudaSlice, CudaStream};
use draw_schedule::DrawSchedule;
use flash_sampling_core::backend::{
    Adjustments, Batch, CheckedRow, Row, RowSummary, check_call, check_rows, reuse_vec,
};
use flash_sampling_core::{
    Capabilities, Description, Knob, Knobs, Matrix, Plan, RowError, RowParams, SampleError, Samples, Shape,
    StreamError, StreamHead, Variant,
};
use logprobs::StreamedLogprobs;
use std::io::Read;
use std::sync::Arc;

/// Tokens of a group of the tiled variant. Draws do not depend on this number.
const TILED_GROUP: u32 = 1024;
/// The maximum number of draws of a call, rows times draws per row: 0.5 GiB on the GPU, and less than 1 GiB on the
/// host.
const MAX_DRAWS: usize = 1 << 22;

/// A sampler for a head larger than device memory. A reader yields the weight, row-major and in native byte order.
///
/// Two blocks of the weight are on the GPU, and two are in pinned host memory. One block is multiplied while the next
/// one is copied and the one after is read.
///
/// [`CudaStreamed::online`] keeps one log-mass and one sample of each draw between blocks (paper Alg. I.3). It is exact
/// in distribution, with the same draws as [`CudaOnline`](crate::CudaOnline). [`CudaStreamed::tiled`] keeps the winner.
/// It is exact pathwise, with the same draws as [`CudaTiled`].
///
/// Log-probabilities equal those of [`CudaTiled`]. For rows that request them, every block is multiplied once more, and
/// the GPU keeps their float32 logits, `[rows, vocab]`. The first such rows allocate this memory.
///
/// Besides blocks and logits, the GPU has one hidden state per row of the plan, for at least 256 draws, and about 120
/// bytes per draw of the plan. This memory grows only if a call has more masks and biases than all earlier calls.
#[derive(Debug)]
pub struct CudaStreamed<'a> {
    head: StreamHead<'a>,
    description: Description,
    stream: Arc<CudaStream>,
    pass: GroupPass,
    /// Tokens of a block, in whole groups.
    tokens: usize,
    blocks: Blocks,
    bias: Option<CudaSlice<f32>>,
    /// The capacity in hidden states.
    room: usize,
    staging: Staging,
    inputs: CudaSlice<u8>,
    /// Per draw: the running summary, the first invalid logit, and the result.
    running: CudaSlice<u8>,
    invalid: CudaSlice<u64>,
    draws: CudaSlice<Draw>,
    adjustments: Adjustments,
    /// The valid rows of the call, and the number of draws of each.
    work: Vec<(usize, u32)>,
    schedule: DrawSchedule,
    /// The draws in launch order, then row by row.
    drawn: Vec<Draw>,
    results: Vec<Draw>,
    /// For plans with log-probabilities.
    logprobs: Option<StreamedLogprobs>,
    checked: Vec<CheckedRow<'static>>,
}

impl<'a> CudaStreamed<'a> {
    /// Plans the online variant with groups of `group` tokens. A block has as many whole groups as fit in
    /// `block_bytes`, at least one.
    ///
    /// # Errors
    /// * [`CudaError::GroupSize`]: `group` is not a positive multiple of 64.
    /// * [`CudaError::Head`]: the head's shape or transforms are unsupported.
    /// * [`CudaError::Unsupported`]: a canonical plan.
    /// * [`CudaError::TooLarge`]: also for more than 2^22 draws of a call.
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

    /// Plans the tiled variant, otherwise like [`CudaStreamed::online`].
    ///
    /// # Errors
    /// Those of [`CudaStreamed::online`].
    pub fn tiled(
        head: StreamHead<'a>,
        plan: Plan,
        block_bytes: usize,
        device: &Arc<Device>,
    ) -> Result<Self, CudaError> {
        let can = CudaTiled::CAPABILITIES;
        let can = Capabilities { without_replacement: false, canonical: false, ..can };
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
        check_plan(&plan, false)?;
        let can = Capabilities { knobs: Knobs::ADJUSTMENTS.with(Knob::LogprobsMode), ..can };
        let most = plan.max_rows.saturating_mul(plan.max_draws as usize);
        CudaError::check_limits(&[("draws", most, MAX_DRAWS)])?;
        let stream = device.stream()?;
        let row_bytes = head.row_bytes();
        // A head without tokens has a block of one token, which no call fills.
        let vocab_size = head.vocab_size.max(1);
        let groups = (block_bytes / row_bytes / group as usize).clamp(1, vocab_size.div_ceil(group as usize));
        let tokens = (groups * group as usize).min(vocab_size);
        let blocks = Blocks::new(tokens * row_bytes, device, &stream)?;
        let failed = CudaError::driver("allocate what a call needs");
        let bias = head.bias.map(|bias| stream.clone_htod(&bias[..head.vocab_size])).transpose().map_err(&failed)?;
        // Without bias: each block has its own bias.
        let first = head_of_block(&head, blocks.address(0), 0, tokens, None);
        let pass = GroupPass::new(&first, most.min(MAX_ROWS), group, rule, device)?;
        let vocab = head.vocab_size as u32;
        let logprobs = plan.max_logprobs.map(|_| StreamedLogprobs::new(&first, vocab, plan.max_rows, device, &stream));
        let logprobs = logprobs.transpose()?;
        let room = plan.max_rows.max(most.min(MAX_ROWS));
        let size = room * row_stride(head.hidden) * size_of::<f32>() + most * size_of::<abi::Row>() + 16;
        let inputs = stream.alloc_zeros(size).map_err(&failed)?;
        let running = stream.alloc_zeros(most * RUNNING_BYTES).map_err(&failed)?;
        let invalid = stream.alloc_zeros(most).map_err(&failed)?;
        let draws = stream.alloc_zeros(most).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        Ok(CudaStreamed {
            head,
            description: Description { capabilities: can, shape: Shape::whole(vocab, head.hidden), plan },
            stream,
            pass,
            tokens,
            blocks,
            bias,
            room,
            staging: Staging::of(0..vocab, vocab),
            inputs,
            running,
            invalid,
            draws,
            adjustments: Adjustments::default(),
            work: Vec::new(),
            schedule: DrawSchedule::default(),
            drawn: Vec::new(),
            results: Vec::new(),
            logprobs,
            checked: Vec::new(),
        })
    }

    /// What the sampler supports, the size of its head, and its plan.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Tokens of a block of the weight.
    pub fn block_tokens(&self) -> usize {
        self.tokens
    }

    /// Draws for `input [rows, hidden]`, and reads the weight once, in order, from `weight`. If no row is valid,
    /// nothing is read.
    ///
    /// # Errors
    /// [`StreamError::Read`] if the reader fails or ends early; [`StreamError::Call`] for other errors of the call.
    pub fn sample(
        &mut self,
        weight: &mut impl Read,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        out: &mut Samples,
    ) -> Result<(), StreamError> {
        out.clear();
        check_call(&input, rows, &self.description.shape, &self.description.plan)?;
        let mut checked = reuse_vec(take(&mut self.checked));
        check_rows(rows, &self.description, &mut checked);
        let batch = Batch { input, params: rows, rows: &checked };
        let drawn = self.draw(weight, &CallRows::new(&batch, &self.description));
        if drawn.is_ok() {
            let mut draws = self.results.as_slice();
            for (r, row) in checked.iter().enumerate() {
                if let Err(error) = row.and_then(|row| self.emit(r, &row, &mut draws, out)) {
                    out.push_error(error);
                }
            }
        }
        self.checked = reuse_vec(checked);
        drawn
    }

    /// Makes the draws of a call, in row order in `results`.
    fn draw(&mut self, weight: &mut impl Read, rows: &CallRows<'_, '_>) -> Result<(), StreamError> {
        self.stage(rows).map_err(SampleError::from)?;
        self.results.clear();
        if self.head.vocab_size == 0 {
            let nothing = Draw { status: status::NO_FINITE_LOGIT, ..Draw::default() };
            self.results.resize(self.schedule.order.len(), nothing);
        } else if !self.work.is_empty() {
            let hidden = self.begin(&rows.batch.input).map_err(SampleError::from)?;
            let row_bytes = self.head.row_bytes();
            for (block, start) in (0..self.head.vocab_size).step_by(self.tokens).enumerate() {
                let count = self.tokens.min(self.head.vocab_size - start);
                let bytes = self.blocks.place_of(block, count * row_bytes).map_err(SampleError::from)?;
                weight.read_exact(bytes).map_err(|source| StreamError::Read { token: start, source })?;
                self.multiply(block, start, count, &hidden).map_err(SampleError::from)?;
            }
            self.end(rows).map_err(SampleError::from)?;
        }
        Ok(())
    }

    /// Appends the result of row `r` from the next draws of `draws`.
    fn emit(&self, r: usize, row: &Row<'_>, draws: &mut &[Draw], out: &mut Samples) -> Result<(), RowError> {
        let (own, rest) = draws.split_at(row.draws as usize);
        *draws = rest;
        own.iter().try_for_each(|draw| candidate(draw).map(drop))?;
        let summary = self.logprobs.as_ref().and_then(|logprobs| logprobs.summary(r));
        let listed = summary.filter(|_| row.logprobs.is_some());
        out.push_row(own.iter().flat_map(candidate), listed.map(|s| &s.mass), listed.map_or(&[], |s| &s.list));
        let raw = summary.filter(|_| row.raw_logprobs.is_some());
        if let Some(RowSummary { raw_mass: Some(mass), raw_top, logits, .. }) = raw {
            out.set_raw(r, mass, raw_top.as_slice(), logits.iter().map(|(_, logit)| *logit));
        }
        Ok(())
    }
}

impl Drop for CudaStreamed<'_> {
    /// Waits for the pending work of a failed call, which uses this value's memory.
    fn drop(&mut self) {
        let copied = self.blocks.wait();
        if wait(self.stream.context(), || self.stream.synchronize()) && copied {
            self.pass.mark_idle();
        }
    }
}

/// The head of a block of the weight, of `rows` tokens.
fn head_of_block(
    head: &StreamHead<'_>,
    address: DeviceAddress<u8>,
    first_token: u32,
    rows: usize,
    bias: Option<DeviceAddress<f32>>,
) -> DeviceHead {
    let (dtype, cols) = (head.dtype, head.hidden);
    let weight = DeviceMatrix { address, dtype, rows, cols, row_stride: cols };
    DeviceHead { first_token, bias, soft_cap: head.soft_cap, scale: head.scale, ..DeviceHead::of(weight) }
}
