//! The kernels that grant a part's wishes.
#![allow(unsafe_code)]

use super::StoredRows;
use crate::abi::{self, Canonical, KeptTokens, NearTies, ScanTokens, StoredLogits, TopLists};
use crate::device::matrix::DeviceMatrix;
use crate::device::results;
use crate::device::standalone::{DeviceDraws, split};
use crate::error::CudaError;
use crate::selection::queries::{CanonicalInputs, Kind, Query};
use cudarc::driver::{CudaStream, DevicePtr};
use flash_sampling_core::DType;
use std::sync::Arc;

/// Where a part's items lie on the device, and how many they are.
#[derive(Clone, Copy, Debug)]
struct Items {
    rows: u64,
    items: u64,
    sources: u64,
    count: usize,
}

impl StoredRows {
    /// Enqueues the kernels for the wishes of a part.
    pub(super) fn launch(
        &mut self,
        kind: Kind,
        wishes: &[Query],
        canonical: Option<&CanonicalInputs>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        if matches!(kind, Kind::Frontiers | Kind::Above) {
            self.stored_scan()?;
        }
        let items = self.copy_up(wishes, stream)?;
        let stored = self.logits(stream);
        let out = KeptTokens {
            tokens: self.kept.device_ptr(stream).0,
            count: self.count.device_ptr(stream).0,
            capacity: self.capacity as u64,
        };
        match kind {
            Kind::Draws => self.launch_draws(stored, items, canonical.map(|_| out), stream)?,
            Kind::Lists => self.launch_lists(stored, items, out, stream)?,
            Kind::Frontiers | Kind::Above => {
                let call = ScanTokens { stored, out, rows: items.rows, items: items.items };
                let kernels = self.surveys.as_ref().ok_or(CudaError::Corrupt { what: "kernels of surveys" })?;
                // SAFETY: logits, items and room for tokens are this value's, sized by `new`; one stream is used.
                unsafe {
                    match kind {
                        Kind::Frontiers => kernels.frontiers(stream, &call, items.count as u32),
                        _ => kernels.tokens_above(stream, &call, items.count as u32),
                    }
                }?;
            }
        }
        canonical.map_or(Ok(()), |inputs| self.launch_canonical(inputs, items, out, stream))
    }

    /// Enqueues the copy of noise, items and sources, and clears the count of kept tokens.
    fn copy_up(&mut self, wishes: &[Query], stream: &Arc<CudaStream>) -> Result<Items, CudaError> {
        let failed = CudaError::driver("copy what is asked of stored logits");
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
        Ok(Items { rows, items, sources, count: wishes.len() })
    }

    /// A draw each; the tokens that may be the winner in canonical sums, too, where there is room for them.
    fn launch_draws(
        &mut self,
        stored: StoredLogits,
        Items { rows, items, sources, count }: Items,
        ties: Option<KeptTokens>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let logits = DeviceMatrix {
            address: stored.logits,
            dtype: DType::F32,
            rows: self.rows,
            cols: self.tokens.len(),
            row_stride: self.stride,
        };
        results::poison(&self.draws, count, stream)?;
        let draws = self.draws.device_ptr(stream).0;
        let asked = DeviceDraws { count, rows, sources: Some(sources), draws, log_z: None };
        // SAFETY: logits, items and draws are this value's, sized by `new`; one stream is used.
        unsafe { self.draw.launch(stream, &logits, &asked) }?;
        let Some(out) = ties else { return Ok(()) };
        let (blocks, parts_of_block) = split(&self.tokens, count, self.device.multiprocessors());
        let call = NearTies { stored, out, rows, items, draws, blocks, parts_of_block };
        // SAFETY: as above; the draws are before it on the stream.
        unsafe { self.kernels.near_ties(stream, &call, count as u32) }
    }

    /// A list each, of the best by score or by logit.
    fn launch_lists(
        &self,
        stored: StoredLogits,
        Items { rows, items, count, .. }: Items,
        out: KeptTokens,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let scores = self.scores.device_ptr(stream).0;
        let call = TopLists { stored, out, rows, items, scores, item_count: count as u32, padding: 0 };
        // SAFETY: logits, items, scores and room for tokens are this value's, sized by `new`; one stream is used.
        unsafe { self.kernels.top_list(stream, &call, self.list_blocks.min(count) as u32) }
    }

    /// Canonical scores and logits of the kept tokens.
    fn launch_canonical(
        &self,
        inputs: &CanonicalInputs,
        Items { rows: noise, items, .. }: Items,
        out: KeptTokens,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let call = Canonical {
            out,
            items,
            noise,
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
        // SAFETY: items and kept tokens are this value's; the rest is the caller's inputs, of which the stored logits are.
        unsafe { self.kernels.canonical(stream, &call) }
    }
}
