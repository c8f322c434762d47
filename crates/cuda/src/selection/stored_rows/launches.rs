//! The launches for a part of the queries.

use super::StoredRows;
use crate::abi::{self, Canonical, DeviceAddress, Item, KeptTokens, NearTies, Row, ScanTokens, StoredLogits, TopLists};
use crate::device::standalone::split;
use crate::device::{DeviceDraws, DeviceMatrix, results};
use crate::error::CudaError;
use crate::first_use::get_or_make;
use crate::selection::stored_scan::StoredScanKernels;
use crate::selection::{CanonicalInputs, Kind, Query};
use flash_sampling_core::DType;

/// The device addresses of a part's items, and their number.
#[derive(Clone, Copy, Debug)]
struct Items {
    rows: DeviceAddress<Row>,
    items: DeviceAddress<Item>,
    sources: DeviceAddress<u32>,
    count: usize,
}

impl StoredRows {
    /// Enqueues the kernels for a part of the queries.
    pub(super) fn launch(
        &mut self,
        kind: Kind,
        queries: &[Query],
        canonical: Option<&CanonicalInputs>,
    ) -> Result<(), CudaError> {
        let items = self.copy_up(queries)?;
        let stored = self.logits();
        let out = KeptTokens {
            tokens: DeviceAddress::of(&self.kept, &self.stream),
            count: DeviceAddress::of(&self.count, &self.stream),
            capacity: self.capacity as u64,
        };
        match kind {
            Kind::Draws => self.launch_draws(stored, items, canonical.map(|_| out))?,
            Kind::Lists => self.launch_lists(stored, items, out)?,
            Kind::Frontiers | Kind::Above => {
                let call = ScanTokens { stored, out, rows: items.rows, items: items.items };
                let kernels = get_or_make(&mut self.scans, || StoredScanKernels::load(&self.device))?;
                let queue = StoredRows::queue(&self.stream);
                match kind {
                    Kind::Frontiers => kernels.frontiers(queue, call, items.count as u32),
                    _ => kernels.tokens_above(queue, call, items.count as u32),
                }?;
            }
        }
        canonical.map_or(Ok(()), |inputs| self.launch_canonical(inputs, items, out))
    }

    /// Enqueues the copy of noise, items and sources, and clears the count of kept tokens.
    fn copy_up(&mut self, queries: &[Query]) -> Result<Items, CudaError> {
        let failed = CudaError::driver("copy queries of stored logits");
        self.staged.clear();
        queries.iter().for_each(|query| self.staged.extend_from_slice(bytemuck::bytes_of(&query.noise)));
        let items_at = self.staged.len();
        queries.iter().for_each(|query| self.staged.extend_from_slice(bytemuck::bytes_of(&query.item)));
        let sources_at = self.staged.len();
        queries.iter().for_each(|query| self.staged.extend_from_slice(bytemuck::bytes_of(&query.item.source)));
        self.stream.memcpy_htod(&self.staged, &mut self.inputs.slice_mut(..self.staged.len())).map_err(&failed)?;
        self.stream.memset_zeros(&mut self.count).map_err(&failed)?;
        let base = DeviceAddress::of(&self.inputs, &self.stream);
        let (items, sources) = (base.add(items_at).cast(), base.add(sources_at).cast());
        Ok(Items { rows: base.cast(), items, sources, count: queries.len() })
    }

    /// Makes one draw per item. With `ties`, also lists the tokens that may win in canonical sums.
    fn launch_draws(
        &mut self,
        stored: StoredLogits,
        Items { rows, items, sources, count }: Items,
        ties: Option<KeptTokens>,
    ) -> Result<(), CudaError> {
        let logits = DeviceMatrix {
            address: stored.logits.cast(),
            dtype: DType::F32,
            rows: self.rows,
            cols: self.tokens.len(),
            row_stride: self.stride,
        };
        let (queue, draws) = (StoredRows::queue(&self.stream), DeviceAddress::of(&self.draws, &self.stream));
        results::poison(draws, count, queue)?;
        let call = DeviceDraws { count, rows, sources: Some(sources), draws };
        self.draw.enqueue(queue, &logits, &call)?;
        let Some(out) = ties else { return Ok(()) };
        let (blocks, parts_of_block) = split(&self.tokens, count, self.device.multiprocessors());
        let call = NearTies { stored, out, rows, items, draws, blocks, parts_of_block };
        self.kernels.near_ties(queue, call, count as u32)
    }

    /// Makes one list per item, of the best tokens by score or by logit.
    fn launch_lists(
        &self,
        stored: StoredLogits,
        Items { rows, items, count, .. }: Items,
        out: KeptTokens,
    ) -> Result<(), CudaError> {
        let scores = DeviceAddress::of(&self.scores, &self.stream);
        let call = TopLists { stored, out, rows, items, scores, item_count: count as u32, padding: 0 };
        self.kernels.top_list(StoredRows::queue(&self.stream), call, self.list_blocks.min(count) as u32)
    }

    /// Computes canonical scores and logits of the kept tokens.
    fn launch_canonical(
        &self,
        inputs: &CanonicalInputs,
        Items { rows: noise, items, .. }: Items,
        out: KeptTokens,
    ) -> Result<(), CudaError> {
        let call = Canonical {
            out,
            items,
            noise,
            rows: inputs.rows,
            weight: inputs.head.weight.address,
            hidden: inputs.hidden.address,
            bias: inputs.head.bias.unwrap_or_default(),
            weight_stride: inputs.head.weight.stride_bytes(),
            hidden_stride: inputs.hidden.row_stride as u64,
            head: inputs.head.transform(),
            weight_type: abi::element(inputs.head.weight.dtype),
            hidden_type: abi::element(inputs.hidden.dtype),
            width: inputs.hidden.cols as u32,
            first_token: self.tokens.start,
            scales: inputs.head.weight_scales(),
        };
        self.kernels.canonical(StoredRows::queue(&self.stream), call)
    }
}
