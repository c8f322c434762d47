//! The exchange of draws between the GPUs of ranks, for samplers over host memory.

use crate::abi::{DeviceAddress, Draw, Row, status};
use crate::device::{Device, Queue, RowsAndDraws};
use crate::error::CudaError;
#[cfg(feature = "nccl")]
use crate::exchange::nccl::DeviceNccl;
use crate::exchange::peers::{DevicePeers, LogitMatrix};
use crate::exchange::sharded::FilterSupport;
use cudarc::driver::CudaSlice;
use flash_sampling_core::backend::digest::of_words;
use flash_sampling_core::{DType, Order, RowParams};
use std::sync::Arc;

/// An exchange that merges the draws of shards on several GPUs, for
/// [`CudaTiled::sample_sharded`](crate::CudaTiled::sample_sharded).
#[derive(Debug)]
pub struct CudaExchange {
    pub(super) kind: ExchangeKind,
    mark: CallFingerprint,
    filters: FilterSupport,
    /// This rank's matrix for the logits of all ranks, before the ranks connect their matrices.
    pub(super) offered: Option<LogitMatrix>,
    /// Rows and draws of a shard without tokens.
    empty: Option<(CudaSlice<Row>, CudaSlice<Draw>)>,
}

#[derive(Debug)]
pub(super) enum ExchangeKind {
    Peers(Box<DevicePeers>),
    #[cfg(feature = "nccl")]
    Nccl(DeviceNccl),
}

impl From<DevicePeers> for CudaExchange {
    fn from(peers: DevicePeers) -> Self {
        CudaExchange::new(ExchangeKind::Peers(Box::new(peers)))
    }
}

#[cfg(feature = "nccl")]
impl From<DeviceNccl> for CudaExchange {
    fn from(nccl: DeviceNccl) -> Self {
        CudaExchange::new(ExchangeKind::Nccl(nccl))
    }
}

/// The fingerprint of the current call, which detects mismatched calls.
#[derive(Debug, Default)]
pub(crate) struct CallFingerprint {
    /// The number of calls, including calls that failed before their exchange.
    calls: u64,
    /// The type, memory and alignment of the hidden states.
    hidden: u64,
    /// The fingerprint, once computed.
    known: Option<u64>,
}

impl CallFingerprint {
    /// The fingerprint of the next call.
    fn next(&self, dtype: DType, is_on_device: bool, is_aligned: bool) -> CallFingerprint {
        let hidden = u64::from(dtype.code()) | u64::from(is_on_device) << 8 | u64::from(!is_aligned) << 9;
        CallFingerprint { calls: self.calls + 1, hidden, known: None }
    }

    /// The fingerprint of the call with these rows, computed once per call.
    ///
    /// Masks take the host a microsecond for 10^5 tokens, so callers launch the draws first.
    pub(crate) fn of(&mut self, rows: &[RowParams<'_>]) -> u64 {
        let (calls, hidden) = (self.calls, self.hidden);
        *self.known.get_or_insert_with(|| of_words([calls, hidden].into_iter().chain(rows.iter().map(host_digest))))
    }
}

/// A digest of the parameters that the GPUs' own digest of a row omits: the content of lists, penalties, and a
/// temperature after the filters.
fn host_digest(row: &RowParams<'_>) -> u64 {
    let temperature = if row.order == Order::LlamaCpp { row.temperature } else { 1.0 };
    RowParams { seed: 0, position: 0, temperature, first_draw: 0, ..*row }.digest()
}

impl CudaExchange {
    fn new(kind: ExchangeKind) -> Self {
        let (mark, filters) = (CallFingerprint::default(), FilterSupport::default());
        CudaExchange { kind, mark, filters, offered: None, empty: None }
    }

    /// Agrees on the filters that the GPUs decide. Every rank of the group calls this before its next call.
    ///
    /// `support` has the [support](crate::CudaTiled::encode_support) of each rank's sampler, in the order of ranks.
    /// This function also allocates the memory of a rank without draws: an allocation during a call may block behind a
    /// rank that waits on the same GPU.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn agree(&mut self, support: &[Vec<u8>]) -> Result<(), CudaError> {
        self.make_room()?;
        let has_records = matches!(self.kind, ExchangeKind::Peers(_));
        self.filters = if has_records { FilterSupport::of_all(support) } else { FilterSupport::default() };
        Ok(())
    }

    /// Allocates room for the rows and draws of a shard without tokens.
    fn make_room(&mut self) -> Result<(), CudaError> {
        if self.empty.is_none() {
            let failed = CudaError::driver("allocate for the draws of an empty shard");
            let (most, stream) = (self.max_rows(), self.device().context().default_stream());
            let room = (stream.alloc_zeros(most).map_err(&failed)?, stream.alloc_zeros(most).map_err(&failed)?);
            stream.synchronize().map_err(&failed)?;
            self.empty = Some(room);
        }
        Ok(())
    }

    /// The filters that all ranks support.
    ///
    /// None before [`CudaExchange::agree`].
    pub(crate) fn filters(&self) -> FilterSupport {
        self.filters
    }

    /// The peer exchange, if any, and its call fingerprint.
    pub(crate) fn peers(&mut self) -> Option<(&mut DevicePeers, &mut CallFingerprint)> {
        match &mut self.kind {
            ExchangeKind::Peers(peers) => Some((peers, &mut self.mark)),
            #[cfg(feature = "nccl")]
            ExchangeKind::Nccl(_) => None,
        }
    }

    /// The maximum number of rows in an exchange.
    pub fn max_rows(&self) -> usize {
        match &self.kind {
            ExchangeKind::Peers(peers) => peers.max_rows(),
            #[cfg(feature = "nccl")]
            ExchangeKind::Nccl(nccl) => nccl.max_rows(),
        }
    }

    /// The GPU of this rank.
    pub fn device(&self) -> &Arc<Device> {
        match &self.kind {
            ExchangeKind::Peers(peers) => peers.device(),
            #[cfg(feature = "nccl")]
            ExchangeKind::Nccl(nccl) => nccl.device(),
        }
    }

    /// Begins a call with a new fingerprint, before any other step of the call can fail.
    ///
    /// The fingerprint separates this call from failed calls of this rank, and from calls of other ranks with other
    /// parameters, or hidden states of another type, alignment or memory: on the device, launches have other rows.
    pub(crate) fn begin(&mut self, dtype: DType, is_on_device: bool, is_aligned: bool) {
        self.mark = self.mark.next(dtype, is_on_device, is_aligned);
    }

    /// Enqueues the exchange of draws, after a launch on the same stream. No draw is
    /// [`UNDECIDED`](crate::abi::status::UNDECIDED).
    ///
    /// With NCCL, this function waits for the exchange, because NCCL's kernels have no timeout for absent ranks.
    pub(crate) fn launch(
        &mut self,
        queue: Queue<'_>,
        rows: RowsAndDraws,
        row_count: usize,
        params: &[RowParams<'_>],
    ) -> Result<(), CudaError> {
        let mark = self.mark.of(params);
        match &mut self.kind {
            ExchangeKind::Peers(peers) => {
                peers.set_mark(mark);
                peers.enqueue(queue, rows, row_count)
            }
            #[cfg(feature = "nccl")]
            ExchangeKind::Nccl(nccl) => {
                nccl.set_mark(mark);
                nccl.enqueue(queue, rows, row_count)?;
                nccl.wait(queue.stream())
            }
        }
    }

    /// Returns the error of the last exchange, after a wait for the stream.
    pub(crate) fn check(&mut self, draws: &[Draw]) -> Result<(), CudaError> {
        match &mut self.kind {
            ExchangeKind::Peers(peers) => {
                peers.mark_idle();
                peers.check(draws)
            }
            #[cfg(feature = "nccl")]
            ExchangeKind::Nccl(nccl) => nccl.check(draws),
        }
    }

    /// Takes part in the exchange with a shard without tokens, and waits.
    pub(crate) fn draw_nothing(
        &mut self,
        (rows, params): (&[Row], &[RowParams<'_>]),
        draws: &mut Vec<Draw>,
        queue: Queue<'_>,
    ) -> Result<(), CudaError> {
        let nothing = Draw {
            token: u32::MAX,
            score: f32::NEG_INFINITY,
            logit: f32::NEG_INFINITY,
            status: status::NO_FINITE_LOGIT,
        };
        draws.clear();
        draws.resize(rows.len(), nothing);
        self.make_room()?;
        let Some((device_rows, device_draws)) = &self.empty else { return Ok(()) };
        CudaError::check_limits(&[("rows", rows.len(), device_rows.len())])?;
        let stream = queue.stream();
        let addresses = (DeviceAddress::of(device_rows, stream), DeviceAddress::of(device_draws, stream));
        queue.copy_up(rows, addresses.0)?;
        queue.copy_up(draws, addresses.1)?;
        self.launch(queue, addresses, rows.len(), params)?;
        queue.copy_down(addresses.1, draws)?;
        self.check(draws)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_differ_if_the_hidden_states_do() {
        let marks = [
            (DType::BF16, false, true),
            (DType::F16, false, true),
            (DType::BF16, true, true),
            (DType::BF16, true, false),
        ]
        .map(|(dtype, is_on_device, is_aligned)| {
            CallFingerprint::default().next(dtype, is_on_device, is_aligned).of(&[RowParams::default()])
        });
        for (i, mark) in marks.iter().enumerate() {
            assert!(!marks[..i].contains(mark), "{i}");
        }
    }

    #[test]
    fn the_host_digest_has_lists_and_penalties_only() {
        let row = RowParams { mask: Some(&[6]), logit_bias: &[(1, 2.0)], ..RowParams::default() };
        for named in [
            RowParams { seed: 9, ..row },
            RowParams { position: 9, ..row },
            RowParams { temperature: 0.0, ..row },
            RowParams { first_draw: 9, ..row },
        ] {
            assert_eq!(host_digest(&named), host_digest(&row), "{named:?}");
        }
        for other in [
            RowParams { mask: Some(&[5]), ..row },
            RowParams { logit_bias: &[(1, 3.0)], ..row },
            RowParams { presence_penalty: 1.0, ..row },
        ] {
            assert_ne!(host_digest(&other), host_digest(&row), "{other:?}");
        }
    }

    /// With filters before the temperature, the row on the GPU has an inverse temperature of 1.
    #[test]
    fn the_host_digest_has_a_temperature_after_filters() {
        let row = RowParams { order: Order::LlamaCpp, top_k: 20, ..RowParams::default() };
        let of = |temperature| host_digest(&RowParams { temperature, ..row });
        assert_ne!(of(0.5), of(2.0));
        assert_eq!(of(0.5), host_digest(&RowParams { temperature: 0.5, seed: 9, position: 9, ..row }));
    }
}
