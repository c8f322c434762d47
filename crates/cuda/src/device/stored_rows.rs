//! Transformed logits that are stored on the GPU, and what is asked of them: masses, the best tokens by score or by
//! logit, draws, and near ties evaluated canonically.
//!
//! ```text
//! store -> masses
//!       -> draws: standalone -> near_ties -> canonical      (the last two for a canonical plan)
//!       -> lists: top_list               -> canonical
//!       -> surveys: frontiers, tokens above floors, sums
//! ```
//! What an item keeps comes down in no order and is sorted here.
#![allow(unsafe_code)]

mod reads;
mod sums;

use crate::abi::{
    self, Canonical, Draw, Item, KeptToken, KeptTokens, NearTies, Row, StoredLogits, SurveyTokens, TopLists, status,
};
use crate::device::gpu::Device;
use crate::device::matrix::DeviceMatrix;
use crate::device::pinned::Pinned;
use crate::device::results;
use crate::device::standalone::{DeviceDraws, DeviceStandalone, split};
use crate::device::stored_kernels::StoredKernels;
use crate::device::survey_kernels::SurveyKernels;
use crate::device::wishes::{CanonicalInputs, Granted, Kind, Wish};
use crate::error::CudaError;
use core::cmp::Reverse;
use core::ops::Range;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use flash_sampling_core::{Candidate, DType, MassHistogram, Winner};
use std::sync::Arc;

/// Bytes of stored logits, and of scores, beyond the first row of each.
const SCRATCH: usize = 64 << 20;
/// The most rows that are stored at a time.
pub(crate) const MAX_ROWS: usize = 256;
/// The most items of a launch.
const MAX_ITEMS: usize = 4096;
/// Bytes of a kept token, and where they begin behind their count.
const KEPT: usize = size_of::<KeptToken>();
const KEPT_AT: usize = 16;

/// Room for the transformed logits of some rows, and the kernels over them.
#[derive(Debug)]
pub(crate) struct StoredRows {
    device: Arc<Device>,
    tokens: Range<u32>,
    rows: usize,
    stride: usize,
    kernels: StoredKernels,
    /// Loaded when a shard is surveyed.
    surveys: Option<SurveyKernels>,
    draw: DeviceStandalone,
    logits: CudaSlice<f32>,
    tops: CudaSlice<u32>,
    words: CudaSlice<u64>,
    /// The items of a launch: their noise, themselves, their sources.
    inputs: CudaSlice<u8>,
    draws: CudaSlice<u8>,
    /// `[list_blocks, tokens]`.
    scores: CudaSlice<u32>,
    list_blocks: usize,
    kept: CudaSlice<u8>,
    count: CudaSlice<u64>,
    capacity: usize,
    staged: Vec<u8>,
    draws_here: Vec<Draw>,
    /// What comes down: masses, or the count of kept tokens and behind it the tokens.
    results: Pinned,
    /// How many kept tokens are fetched with their count, of items whose number is not known.
    expected: usize,
    /// Kept tokens by items, and where each item's end.
    kept_here: Vec<KeptToken>,
    kept_ends: Vec<usize>,
    words_here: Vec<u64>,
    logits_here: Vec<f32>,
    /// The logits of some tokens.
    some_here: Vec<f32>,
}

impl StoredRows {
    /// Plans for the tokens `tokens` and up to `max_rows` rows, fewer where they do not fit into 64 MiB.
    pub(crate) fn new(
        tokens: Range<u32>,
        max_rows: usize,
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
    ) -> Result<Self, CudaError> {
        let kernels = StoredKernels::load(device)?;
        let stride = tokens.len().next_multiple_of(4);
        let fitting = (SCRATCH / (4 * stride)).max(1);
        let rows = max_rows.min(MAX_ROWS).min(fitting);
        let list_blocks = fitting.min(device.multiprocessors() as usize).min(max_rows.saturating_mul(2));
        let capacity = tokens.len().max(1 << 16);
        let allocate = CudaError::driver("allocate room for stored logits");
        let draw = DeviceStandalone::new(tokens.clone(), DType::F32, MAX_ITEMS, device)?;
        let each = size_of::<Row>() + size_of::<Item>() + size_of::<u32>();
        Ok(StoredRows {
            device: device.clone(),
            rows,
            stride,
            kernels,
            surveys: None,
            draw,
            logits: stream.alloc_zeros(rows * stride).map_err(&allocate)?,
            tops: stream.alloc_zeros(rows).map_err(&allocate)?,
            words: stream.alloc_zeros(rows * MassHistogram::WORDS).map_err(&allocate)?,
            inputs: stream.alloc_zeros(MAX_ITEMS * each).map_err(&allocate)?,
            draws: stream.alloc_zeros(MAX_ITEMS * size_of::<Draw>()).map_err(&allocate)?,
            scores: stream.alloc_zeros(list_blocks * tokens.len()).map_err(&allocate)?,
            list_blocks,
            kept: stream.alloc_zeros(capacity * size_of::<KeptToken>()).map_err(&allocate)?,
            count: stream.alloc_zeros(1).map_err(&allocate)?,
            capacity,
            tokens,
            staged: Vec::new(),
            draws_here: Vec::new(),
            results: Pinned::new((KEPT_AT + capacity * KEPT).max(8 * rows * MassHistogram::WORDS), stream)?,
            expected: 0,
            kept_here: Vec::new(),
            kept_ends: Vec::new(),
            words_here: Vec::new(),
            logits_here: Vec::new(),
            some_here: Vec::new(),
        })
    }

    /// What is in the place, or is made there by [`StoredRows::new`].
    pub(crate) fn made_in<'s>(
        place: &'s mut Option<StoredRows>,
        tokens: Range<u32>,
        max_rows: usize,
        device: &Arc<Device>,
        stream: &Arc<CudaStream>,
    ) -> Result<&'s mut StoredRows, CudaError> {
        match place {
            Some(stored) => Ok(stored),
            empty => Ok(empty.insert(StoredRows::new(tokens, max_rows, device, stream)?)),
        }
    }

    /// How many rows are stored at a time.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Which tokens.
    pub(crate) fn tokens(&self) -> Range<u32> {
        self.tokens.clone()
    }

    /// Where the transformed logits are to be stored: device address of the first row, floats from one row to the next.
    pub(crate) fn place(&self, stream: &Arc<CudaStream>) -> (u64, usize) {
        (self.logits.device_ptr(stream).0, self.stride)
    }

    fn logits(&self, stream: &Arc<CudaStream>) -> StoredLogits {
        let (logits, stride) = self.place(stream);
        let (first_token, tokens) = (self.tokens.start, self.tokens.len() as u32);
        StoredLogits { logits, row_stride: stride as u64, first_token, tokens }
    }

    /// The masses of each of the first `rows` stored rows, as words for [`MassHistogram::from_words`]. Waits.
    pub(crate) fn masses(&mut self, rows: usize, stream: &Arc<CudaStream>) -> Result<&[u64], CudaError> {
        let failed = CudaError::driver("sum the masses of stored logits");
        stream.memset_zeros(&mut self.tops).map_err(&failed)?;
        stream.memset_zeros(&mut self.words).map_err(&failed)?;
        let stored = self.logits(stream);
        let (tops, words) = (self.tops.device_ptr(stream).0, self.words.device_ptr(stream).0);
        // SAFETY: logits, tops and words are this value's, sized by `new`; the last two were just cleared.
        unsafe { self.kernels.sum_masses(stream, &stored, rows as u32, tops, words) }?;
        let bytes = 8 * rows.min(self.rows) * MassHistogram::WORDS;
        // SAFETY: the words are this value's, and as many.
        unsafe { self.results.copy_down(words, 0, bytes, stream) }?;
        stream.synchronize().map_err(&failed)?;
        Ok(bytemuck::cast_slice(&self.results.bytes()?[..bytes]))
    }

    /// Grants wishes and appends what they come to; with canonical inputs by canonical scores and logits. Waits.
    pub(crate) fn keep(
        &mut self,
        kind: Kind,
        wishes: &[Wish],
        canonical: Option<&CanonicalInputs>,
        granted: &mut Granted,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let mut rest = wishes;
        while !rest.is_empty() {
            let mut room = self.capacity;
            let fits = |wish: &&Wish| {
                let asked = if kind == Kind::Lists { (wish.item.limit as usize).min(self.tokens.len()) } else { 0 };
                let fits = asked <= room;
                room = room.saturating_sub(asked);
                fits
            };
            let count = rest.iter().take(MAX_ITEMS).take_while(fits).count();
            let (part, after) = rest.split_at(count);
            self.keep_part(kind, part, canonical, granted, stream)?;
            rest = after;
        }
        Ok(())
    }

    fn keep_part(
        &mut self,
        kind: Kind,
        wishes: &[Wish],
        canonical: Option<&CanonicalInputs>,
        granted: &mut Granted,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let failed = CudaError::driver("evaluate stored logits");
        self.launch(kind, wishes, canonical, stream)?;
        let keeps_tokens = kind != Kind::Draws || canonical.is_some();
        // Of lists it is known how many there are at most.
        let most = |wish: &Wish| (wish.item.limit as usize).min(self.tokens.len());
        let fetched = match kind {
            Kind::Lists if canonical.is_none() => wishes.iter().map(most).sum(),
            _ => self.expected,
        };
        let fetched = fetched.min(self.capacity);
        if keeps_tokens {
            let (count, kept) = (self.count.device_ptr(stream).0, self.kept.device_ptr(stream).0);
            // SAFETY: count and tokens are this value's, and as many.
            unsafe {
                self.results.copy_down(count, 0, size_of::<u64>(), stream)?;
                self.results.copy_down(kept, KEPT_AT, fetched * KEPT, stream)?;
            }
        } else {
            self.draws_here.resize(wishes.len(), Draw::default());
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.draws_here);
            stream.memcpy_dtoh(&self.draws.slice(..bytes.len()), bytes).map_err(&failed)?;
        }
        stream.synchronize().map_err(&failed)?;
        self.draw.settle();
        if !keeps_tokens {
            results::written(&self.draws_here)?;
            for draw in &self.draws_here {
                let winner = Winner::new(draw.score, draw.token);
                granted.push((draw.status == status::DRAWN).then_some(Candidate { winner, logit: draw.logit }));
            }
            return Ok(());
        }
        let count = bytemuck::pod_read_unaligned::<u64>(&self.results.bytes()?[..size_of::<u64>()]) as usize;
        if count > self.capacity {
            // Near ties without number: the items of one half at a time. One item has room for every token.
            let (first, second) = wishes.split_at(wishes.len() / 2);
            if first.is_empty() {
                return Err(CudaError::Corrupt { what: "more tokens" });
            }
            self.keep_part(kind, first, canonical, granted, stream)?;
            return self.keep_part(kind, second, canonical, granted, stream);
        }
        if count > fetched {
            let (from, size) = (fetched * KEPT, (count - fetched) * KEPT);
            let kept = self.kept.device_ptr(stream).0 + from as u64;
            // SAFETY: as above.
            unsafe { self.results.copy_down(kept, KEPT_AT + from, size, stream) }?;
            stream.synchronize().map_err(&failed)?;
        }
        if kind != Kind::Lists {
            // A little more than this time: rows of a model are alike.
            self.expected = count + count / 4;
        }
        self.arrange(count, wishes.len())?;
        let mut from = 0;
        for (wish, &end) in wishes.iter().zip(&self.kept_ends) {
            let own = &mut self.kept_here[from..end];
            from = end;
            own.sort_unstable_by_key(|kept| Reverse(kept.key));
            let best = own.iter().filter(|kept| kept.key != 0).take(wish.item.limit as usize);
            granted.push(best.map(|kept| Candidate { winner: Winner::from_ordered_bits(kept.key), logit: kept.logit }));
        }
        Ok(())
    }

    /// Puts the `count` kept tokens that came down into the order of their items: by counting, so that no sort is longer than
    /// an item's.
    fn arrange(&mut self, count: usize, items: usize) -> Result<(), CudaError> {
        let kept: &[KeptToken] = bytemuck::cast_slice(&self.results.bytes()?[KEPT_AT..KEPT_AT + count * KEPT]);
        if kept.iter().any(|kept| kept.item as usize >= items) {
            return Err(CudaError::Corrupt { what: "the item of a token" });
        }
        // First how many each item has, then where it begins, and as its tokens come, where it ends.
        self.kept_ends.clear();
        self.kept_ends.resize(items, 0);
        kept.iter().for_each(|kept| self.kept_ends[kept.item as usize] += 1);
        let mut begin = 0;
        for place in &mut self.kept_ends {
            begin += core::mem::replace(place, begin);
        }
        self.kept_here.resize(count, KeptToken::default());
        for kept in kept {
            let place = &mut self.kept_ends[kept.item as usize];
            self.kept_here[*place] = *kept;
            *place += 1;
        }
        Ok(())
    }

    /// Enqueues the kernels for the wishes of a part.
    fn launch(
        &mut self,
        kind: Kind,
        wishes: &[Wish],
        canonical: Option<&CanonicalInputs>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let failed = CudaError::driver("copy what is asked of stored logits");
        if matches!(kind, Kind::Frontiers | Kind::Above) {
            self.survey_kernels()?;
        }
        self.staged.clear();
        wishes.iter().for_each(|wish| self.staged.extend_from_slice(bytemuck::bytes_of(&wish.noise)));
        let items_at = self.staged.len();
        wishes.iter().for_each(|wish| self.staged.extend_from_slice(bytemuck::bytes_of(&wish.item)));
        let sources_at = self.staged.len();
        wishes.iter().for_each(|wish| self.staged.extend_from_slice(bytemuck::bytes_of(&wish.item.source)));
        stream.memcpy_htod(&self.staged, &mut self.inputs.slice_mut(..self.staged.len())).map_err(&failed)?;
        stream.memset_zeros(&mut self.count).map_err(&failed)?;

        let rows = self.inputs.device_ptr(stream).0;
        let (items, sources) = (rows + items_at as u64, rows + sources_at as u64);
        let draws = self.draws.device_ptr(stream).0;
        let stored = self.logits(stream);
        let out = KeptTokens {
            tokens: self.kept.device_ptr(stream).0,
            count: self.count.device_ptr(stream).0,
            capacity: self.capacity as u64,
        };
        // SAFETY (of all): what the arguments point to is this value's, sized by `new`, or the caller's inputs that the stored
        // logits come from; one stream is used.
        match kind {
            Kind::Draws => {
                let logits = DeviceMatrix {
                    address: stored.logits,
                    dtype: DType::F32,
                    rows: self.rows,
                    cols: self.tokens.len(),
                    row_stride: self.stride,
                };
                results::poison(&self.draws, wishes.len(), stream)?;
                let asked = DeviceDraws { count: wishes.len(), rows, sources: Some(sources), draws, log_z: None };
                // SAFETY: as above.
                unsafe { self.draw.launch(stream, &logits, &asked) }?;
                if canonical.is_some() {
                    let (blocks, parts_of_block) = split(&self.tokens, wishes.len(), self.device.multiprocessors());
                    let call = NearTies { stored, out, rows, items, draws, blocks, parts_of_block };
                    // SAFETY: as above.
                    unsafe { self.kernels.near_ties(stream, &call, wishes.len() as u32) }?;
                }
            }
            Kind::Lists => {
                let scores = self.scores.device_ptr(stream).0;
                let call = TopLists { stored, out, rows, items, scores, item_count: wishes.len() as u32, padding: 0 };
                // SAFETY: as above.
                unsafe { self.kernels.top_list(stream, &call, self.list_blocks.min(wishes.len()) as u32) }?;
            }
            Kind::Frontiers | Kind::Above => {
                let (call, items) = (SurveyTokens { stored, out, rows, items }, wishes.len() as u32);
                let kernels = self.surveys.as_ref().ok_or(CudaError::Corrupt { what: "kernels of surveys" })?;
                // SAFETY: as above.
                unsafe {
                    match kind {
                        Kind::Frontiers => kernels.frontiers(stream, &call, items),
                        _ => kernels.tokens_above(stream, &call, items),
                    }
                }?;
            }
        }
        let Some(inputs) = canonical else { return Ok(()) };
        let call = Canonical {
            out,
            items,
            noise: rows,
            rows: inputs.rows,
            weight: inputs.head.weight.address,
            hidden: inputs.hidden.address,
            bias: inputs.head.bias.unwrap_or(0),
            weight_stride: inputs.head.weight.row_stride as u64,
            hidden_stride: inputs.hidden.row_stride as u64,
            head: inputs.head.transform(),
            weight_type: abi::element(inputs.head.weight.dtype),
            hidden_type: abi::element(inputs.hidden.dtype),
            width: inputs.hidden.cols as u32,
            first_token: self.tokens.start,
        };
        // SAFETY: as above.
        unsafe { self.kernels.canonical(stream, &call) }
    }
}
