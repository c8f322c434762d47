//! Draws over host memory that ranks make together on their GPUs.

use crate::abi::{DeviceAddress, Draw, Row, status};
use crate::device::gpu::Device;
use crate::device::launch::Queue;
use crate::device::tiled::RowsAndDraws;
use crate::error::CudaError;
#[cfg(feature = "nccl")]
use crate::exchange::nccl::DeviceNccl;
use crate::exchange::peers::DevicePeers;
use crate::exchange::sharded::FiltersTogether;
use cudarc::driver::CudaSlice;
use flash_sampling_core::backend::digest::of_words;
use flash_sampling_core::{DType, Order, RowParams};
use std::sync::Arc;

/// How the draws of shards on several GPUs become those of the whole vocabulary, for
/// [`CudaTiled::sample_sharded`](crate::CudaTiled::sample_sharded).
#[derive(Debug)]
pub struct CudaExchange {
    way: Way,
    mark: CallFingerprint,
    /// What its ranks decide of rows with filters.
    filters: FiltersTogether,
    /// Rows and draws of a shard without tokens.
    empty: Option<(CudaSlice<Row>, CudaSlice<Draw>)>,
}

#[derive(Debug)]
enum Way {
    Peers(Box<DevicePeers>),
    #[cfg(feature = "nccl")]
    Nccl(DeviceNccl),
}

impl From<DevicePeers> for CudaExchange {
    fn from(peers: DevicePeers) -> Self {
        CudaExchange::new(Way::Peers(Box::new(peers)))
    }
}

#[cfg(feature = "nccl")]
impl From<DeviceNccl> for CudaExchange {
    fn from(nccl: DeviceNccl) -> Self {
        CudaExchange::new(Way::Nccl(nccl))
    }
}

/// What tells the call that was begun from others.
#[derive(Debug, Default)]
pub(crate) struct CallFingerprint {
    /// Calls that were begun, those that failed before their exchange among them.
    calls: u64,
    /// The type of the hidden states.
    dtype: u8,
    /// Where it is worked out.
    known: Option<u64>,
}

impl CallFingerprint {
    /// The mark of the call with these rows. Launches that draw are under way before it is asked for: masks take the host a
    /// microsecond for 10^5 tokens, in which the GPU need not wait.
    pub(crate) fn of(&mut self, rows: &[RowParams<'_>]) -> u64 {
        let (calls, dtype) = (self.calls, u64::from(self.dtype));
        *self.known.get_or_insert_with(|| of_words([calls, dtype].into_iter().chain(rows.iter().map(beyond_the_row))))
    }
}

/// The number of a type between ranks.
pub(crate) fn number_of(dtype: DType) -> u8 {
    match dtype {
        DType::BF16 => 0,
        DType::F16 => 1,
        DType::F32 => 2,
    }
}

/// A digest of what GPUs leave out when they make a row's own: what is in its lists, and penalties; and a temperature that comes
/// after filters, which the row's own does not have.
fn beyond_the_row(row: &RowParams<'_>) -> u64 {
    let temperature = if row.order == Order::LlamaCpp { row.temperature } else { 1.0 };
    RowParams { seed: 0, position: 0, temperature, first_draw: 0, ..*row }.digest()
}

impl CudaExchange {
    fn new(way: Way) -> Self {
        CudaExchange { way, mark: CallFingerprint::default(), filters: FiltersTogether::default(), empty: None }
    }

    /// Agrees on which rows with filters the GPUs decide, from what each rank's sampler
    /// [told](crate::CudaTiled::encode_support), in the order of ranks. Every rank of the group does so, before its next call.
    /// Allocates what a call takes in which a rank has no draws: what is allocated while another rank waits on the same GPU
    /// may stand behind it.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn agree(&mut self, told: &[Vec<u8>]) -> Result<(), CudaError> {
        self.make_room()?;
        let has_records = matches!(self.way, Way::Peers(_));
        self.filters = if has_records { FiltersTogether::of_all(told) } else { FiltersTogether::default() };
        Ok(())
    }

    /// Room for the rows and draws of a shard without tokens.
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

    /// What the ranks agreed on.
    pub(crate) fn filters(&self) -> FiltersTogether {
        self.filters
    }

    /// The exchange by peers, where it is one, and what its mark is found by.
    pub(crate) fn peers(&mut self) -> Option<(&mut DevicePeers, &mut CallFingerprint)> {
        match &mut self.way {
            Way::Peers(peers) => Some((peers, &mut self.mark)),
            #[cfg(feature = "nccl")]
            Way::Nccl(_) => None,
        }
    }

    /// Rows of the largest exchange.
    pub fn max_rows(&self) -> usize {
        match &self.way {
            Way::Peers(peers) => peers.max_rows(),
            #[cfg(feature = "nccl")]
            Way::Nccl(nccl) => nccl.max_rows(),
        }
    }

    /// The GPU that it is of.
    pub fn device(&self) -> &Arc<Device> {
        match &self.way {
            Way::Peers(peers) => peers.device(),
            #[cfg(feature = "nccl")]
            Way::Nccl(nccl) => nccl.device(),
        }
    }

    /// Begins a call, before anything of it can fail: what the other ranks sent for a call that failed here is not taken for
    /// the next one's, nor one of hidden states of another type or of other parameters for this one's.
    pub(crate) fn begin(&mut self, dtype: DType) {
        self.mark = CallFingerprint { calls: self.mark.calls + 1, dtype: number_of(dtype), known: None };
    }

    /// Enqueues the exchange of the draws that a launch on the stream makes, of a call with these parameters, and waits for it
    /// where nothing on the GPU ends the wait for a rank that does not come. No draw is
    /// [`UNDECIDED`](crate::abi::status::UNDECIDED).
    pub(crate) fn launch(
        &mut self,
        queue: Queue<'_>,
        rows: RowsAndDraws,
        row_count: usize,
        params: &[RowParams<'_>],
    ) -> Result<(), CudaError> {
        let mark = self.mark.of(params);
        match &mut self.way {
            Way::Peers(peers) => {
                peers.set_mark(mark);
                peers.enqueue(queue, rows, row_count)
            }
            #[cfg(feature = "nccl")]
            Way::Nccl(nccl) => {
                nccl.set_mark(mark);
                nccl.enqueue(queue, rows, row_count)?;
                nccl.wait(queue.stream())
            }
        }
    }

    /// What went wrong, when the stream was waited for.
    pub(crate) fn check(&mut self, draws: &[Draw]) -> Result<(), CudaError> {
        match &mut self.way {
            Way::Peers(peers) => {
                peers.settle();
                peers.check(draws)
            }
            #[cfg(feature = "nccl")]
            Way::Nccl(nccl) => nccl.check(draws),
        }
    }

    /// Takes part without draws, as a shard that has no tokens does, and waits.
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
        let Some((rows_there, draws_there)) = &self.empty else { return Ok(()) };
        if rows.len() > rows_there.len() {
            return Err(CudaError::TooLarge { what: "rows", found: rows.len(), limit: rows_there.len() });
        }
        let stream = queue.stream();
        let there = (DeviceAddress::of(rows_there, stream), DeviceAddress::of(draws_there, stream));
        queue.copy_up(rows, there.0)?;
        queue.copy_up(draws, there.1)?;
        self.launch(queue, there, rows.len(), params)?;
        queue.copy_down(there.1, draws)?;
        self.check(draws)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_penalties_count_beyond_the_row_and_what_names_it_does_not() {
        let row = RowParams { mask: Some(&[6]), logit_bias: &[(1, 2.0)], ..RowParams::default() };
        for named in [
            RowParams { seed: 9, ..row },
            RowParams { position: 9, ..row },
            RowParams { temperature: 0.0, ..row },
            RowParams { first_draw: 9, ..row },
        ] {
            assert_eq!(beyond_the_row(&named), beyond_the_row(&row), "{named:?}");
        }
        for other in [
            RowParams { mask: Some(&[5]), ..row },
            RowParams { logit_bias: &[(1, 3.0)], ..row },
            RowParams { presence_penalty: 1.0, ..row },
        ] {
            assert_ne!(beyond_the_row(&other), beyond_the_row(&row), "{other:?}");
        }
    }

    /// The row that a GPU digests then has an inverse temperature of 1.
    #[test]
    fn a_temperature_after_filters_counts_beyond_the_row() {
        let row = RowParams { order: Order::LlamaCpp, top_k: 20, ..RowParams::default() };
        let of = |temperature| beyond_the_row(&RowParams { temperature, ..row });
        assert_ne!(of(0.5), of(2.0));
        assert_eq!(of(0.5), beyond_the_row(&RowParams { temperature: 0.5, seed: 9, position: 9, ..row }));
    }
}
