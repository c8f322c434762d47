//! Heads larger than device memory: blocks of the weight come from the host while others are multiplied (paper Alg. I.3).
//!
//! `call` is a call step by step, `blocks` moves the weight, `deal` says which launch makes which draw, `asked` has the rows
//! that ask for log-probabilities.

mod blocks;
mod call;
mod deal;
mod stored_rows;

use crate::abi::{Draw, RUNNING_BYTES, Row, status};
use crate::device::fused_hopper::MAX_ROWS;
use crate::device::gpu::Device;
use crate::device::group_pass::{GroupPass, check_group};
use crate::device::head::DeviceHead;
use crate::device::matrix::DeviceMatrix;
use crate::device::scratch::wait;
use crate::device::select::GroupRule;
use crate::error::CudaError;
use crate::host::check_plan;
use crate::host::grouped::in_distribution;
use crate::host::raw;
use crate::host::results::push_row;
use crate::host::staging::Staging;
use crate::host::tiled::{CudaTiled, RAW_TOO};
use blocks::Blocks;
use cudarc::driver::{CudaSlice, CudaStream};
use deal::Deal;
use flash_sampling_core::sampler::check_call;
use flash_sampling_core::{
    Adjustments, Capabilities, Matrix, Plan, RowParams, SampleError, Samples, Shape, StreamError, StreamHead, Variant,
};
use std::io::Read;
use std::sync::Arc;
use stored_rows::Asked;

/// Tokens of a group of the tiled variant, whose draws do not depend on it.
const TILED_GROUP: u32 = 1024;
/// The most draws of a call, rows times draws of a row: half a GiB on the GPU, and less than a GiB beside it on the host.
const MAX_DRAWS: usize = 1 << 22;

/// Draws over a reader that yields the weight, row-major and in native byte order: a head larger than device memory. Two
/// blocks of the weight are on the GPU, and two beside them in host memory that the GPU copies from: while one block is
/// multiplied the next is copied and the one after is read.
///
/// [`CudaStreamed::online`] keeps of each draw one log-mass and one sample between blocks (paper Alg. I.3), exact in
/// distribution: the draws are those of [`CudaOnline`](crate::CudaOnline). [`CudaStreamed::tiled`] keeps the winner, exact
/// pathwise: the draws are those of [`CudaTiled`].
///
/// Log-probabilities are those of [`CudaTiled`] too. For the rows that ask, every block is multiplied once more, and their
/// float32 logits are kept on the GPU, `[rows, vocab]`; the memory is allocated when the first such rows come.
///
/// Beside the blocks and those logits the GPU holds a hidden state for each row of the plan, of 256 draws at least, and
/// about 120 bytes for each draw of the plan; that grows only when a call brings more masks and biases than any before it.
#[derive(Debug)]
pub struct CudaStreamed<'a> {
    head: StreamHead<'a>,
    plan: Plan,
    can: Capabilities,
    stream: Arc<CudaStream>,
    pass: GroupPass,
    /// Tokens of a block: whole groups.
    tokens: usize,
    blocks: Blocks,
    bias: Option<CudaSlice<f32>>,
    /// Hidden states that there is room for.
    room: usize,
    staging: Staging,
    inputs: CudaSlice<u8>,
    /// Of each draw: what is known of it, its first invalid logit, its result.
    running: CudaSlice<u8>,
    invalid: CudaSlice<u64>,
    draws: CudaSlice<u8>,
    adjustments: Adjustments,
    /// The rows of the call that can be drawn from, and how many draws they make.
    work: Vec<(usize, u32)>,
    deal: Deal,
    /// In the order in which they were made, and row by row.
    made: Vec<Draw>,
    results: Vec<Draw>,
    /// For plans with log-probabilities; and the rows of the call that ask, each with its first draw.
    asked: Option<Asked>,
    asking: Vec<(usize, u32)>,
}

impl<'a> CudaStreamed<'a> {
    /// Plans the online variant with groups of `group` tokens. A block has as many whole groups as `block_bytes` hold, and
    /// one at least.
    ///
    /// # Errors
    /// * [`CudaError::GroupSize`]: `group` is not a positive multiple of 64.
    /// * [`CudaError::Head`]: the head's shape or transforms cannot be used.
    /// * [`CudaError::Unsupported`]: a canonical plan.
    /// * [`CudaError::TooLarge`]: also more than 2^22 draws of a call.
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
        let can = CudaTiled::CAPABILITIES;
        let can = Capabilities { knobs: RAW_TOO, without_replacement: false, canonical: false, ..can };
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
        let most = plan.max_rows.saturating_mul(plan.max_draws as usize);
        if most > MAX_DRAWS {
            return Err(CudaError::TooLarge { what: "draws", found: most, limit: MAX_DRAWS });
        }
        let stream = device.stream()?;
        let row_bytes = head.hidden * head.dtype.size();
        // Of a head without tokens a block of one, which no call fills.
        let vocab_size = head.vocab_size.max(1);
        let groups = (block_bytes / row_bytes / group as usize).clamp(1, vocab_size.div_ceil(group as usize));
        let tokens = (groups * group as usize).min(vocab_size);
        let blocks = Blocks::new(tokens * row_bytes, device, &stream)?;
        let failed = CudaError::driver("allocate what a call needs");
        let bias = head.bias.map(|bias| stream.clone_htod(&bias[..head.vocab_size])).transpose().map_err(&failed)?;
        let first = first_block(&head, &blocks, tokens);
        let pass = GroupPass::new(&first, most.min(MAX_ROWS), group, rule, device)?;
        let vocab = head.vocab_size as u32;
        let asks = plan.max_logprobs.is_some();
        let asked = asks.then(|| Asked::new(&first, vocab, plan.max_rows, device, &stream)).transpose()?;
        let room = plan.max_rows.max(most.min(MAX_ROWS));
        let size = room * hidden_stride(head.hidden) * size_of::<f32>() + most * size_of::<Row>() + 16;
        let inputs = stream.alloc_zeros(size).map_err(&failed)?;
        let running = stream.alloc_zeros(most * RUNNING_BYTES).map_err(&failed)?;
        let invalid = stream.alloc_zeros(most).map_err(&failed)?;
        let draws = stream.alloc_zeros(most * size_of::<Draw>()).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        Ok(CudaStreamed {
            head,
            plan,
            can,
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
            deal: Deal::default(),
            made: Vec::new(),
            results: Vec::new(),
            asked,
            asking: Vec::new(),
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

    /// Draws for `input [rows, hidden]`, reading the weight once, in order, from `weight`. Where no row can be drawn from,
    /// nothing is read.
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
        let failed = |error| SampleError::Backend { backend: "cuda", source: Box::new(error) };
        self.stage(&input, rows).map_err(failed)?;
        self.results.clear();
        if self.head.vocab_size == 0 {
            let nothing = Draw { status: status::NO_FINITE_LOGIT, ..Draw::default() };
            self.results.resize(self.deal.order.len(), nothing);
        } else if !self.work.is_empty() {
            let hidden = self.begin(&input).map_err(failed)?;
            let row_bytes = self.head.hidden * self.head.dtype.size();
            for (block, start) in (0..self.head.vocab_size).step_by(self.tokens).enumerate() {
                let count = self.tokens.min(self.head.vocab_size - start);
                let bytes = self.blocks.place_of(block, count * row_bytes).map_err(failed)?;
                weight.read_exact(bytes).map_err(|source| StreamError::Read { token: start, source })?;
                self.multiply(block, start, count, &hidden).map_err(failed)?;
            }
            self.end().map_err(failed)?;
        }
        let (mut results, mut asking) = (self.results.as_slice(), self.asking.iter().enumerate().peekable());
        let (can, plan, vocab_size) = (self.can, self.plan, self.head.vocab_size as u32);
        for (r, params) in rows.iter().enumerate() {
            let asked = asking.next_if(|(_, (row, _))| *row == r).map(|(i, _)| i).filter(|_| vocab_size > 0);
            let is_raw = raw::bare(params).is_some();
            let (mass, top) = match (&self.asked, asked) {
                (Some(answers), Some(i)) if !is_raw => answers.extras(i),
                _ => (None, [].as_slice()),
            };
            let row = params.check(self.adjustments.row(r), &can, &plan, vocab_size);
            if let Err(error) = row.and_then(|row| push_row(&mut results, &row, mass, top, out)) {
                out.push_error(error);
            } else if let (true, Some(answers), Some(i)) = (is_raw, &mut self.asked, asked) {
                let noted = answers.note_raw(i, r, &self.stream, out);
                noted.map_err(|error| {
                    out.clear();
                    failed(error)
                })?;
            }
        }
        Ok(())
    }
}

/// Elements from one hidden state to the next.
pub(super) fn hidden_stride(hidden: usize) -> usize {
    hidden.next_multiple_of(8)
}

impl Drop for CudaStreamed<'_> {
    /// Waits for what a call that failed left behind: it uses this value's memory.
    fn drop(&mut self) {
        let copied = self.blocks.wait();
        if wait(self.stream.context(), || self.stream.synchronize()) && copied {
            self.pass.settle();
        }
    }
}

/// The head of the first block, without bias: each block's is told as the block comes.
fn first_block(head: &StreamHead<'_>, blocks: &Blocks, tokens: usize) -> DeviceHead {
    let (dtype, cols) = (head.dtype, head.hidden);
    let weight = DeviceMatrix { address: blocks.address(0), dtype, rows: tokens, cols, row_stride: cols };
    DeviceHead { weight, first_token: 0, bias: None, soft_cap: head.soft_cap, scale: head.scale }
}
