//! Ranks whose weight, hidden states, parameters and results are in device memory, for calls that do not wait.

use super::backends::gpu_columns::{Arrays, Results};
use super::backends::gpu_memory::{HeldHead, copied, part};
use super::backends::gpu_ranks::{GpuRanks, Rank, in_place};
use flash_sampling::CudaRank;
use flash_sampling::distributed::{Loopback, Transport};
use flash_sampling::{CudaRankOptions, GpuExchange};
use flash_sampling_core::{Head, Matrix, Plan, RowParams, SampleError, Samples};
use flash_sampling_cuda::abi::{RowColumns, TokenColumns, status};
use flash_sampling_cuda::cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_cuda::{ColumnCall, DeviceAddress, DeviceHidden, DeviceMatrix};
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// A rank over a copy of its shard and of the hidden states.
pub(crate) struct OnRank {
    pub(crate) sampler: CudaRank<'static, Loopback>,
    pub(crate) stream: Arc<CudaStream>,
    pub(crate) hidden: DeviceMatrix,
    _held: (HeldHead, CudaSlice<u8>),
}

/// The arrays of a call on a rank.
pub(crate) struct OnRankArrays {
    _arrays: Arrays,
    pub(crate) results: Results,
    pub(crate) columns: RowColumns,
    pub(crate) out: TokenColumns,
}

impl OnRank {
    /// Copies the parameters of rows, and waits. A copy in a call could stand behind a rank that waits on the same GPU.
    pub(crate) fn arrays(&self, rows: &[RowParams<'_>], vocab: usize) -> OnRankArrays {
        let arrays = Arrays::of(rows, vocab, &self.stream);
        let results = Results::new(rows.len(), &self.stream);
        let (columns, out) = (arrays.columns, results.columns(&self.stream));
        self.stream.synchronize().unwrap();
        OnRankArrays { _arrays: arrays, results, columns, out }
    }

    /// The hidden states of some rows.
    pub(crate) fn states(&self, rows: Range<usize>) -> DeviceMatrix {
        part(&self.hidden, rows)
    }

    /// Makes a call that waits, with the hidden states of some rows.
    pub(crate) fn waited(&mut self, which: Range<usize>, rows: &[RowParams<'_>]) -> Samples {
        // SAFETY: the hidden states are on this device until the group is dropped, and are not written.
        let hidden = unsafe { DeviceHidden::new(&self.stream, self.states(which)) }.unwrap();
        let mut out = Samples::new();
        self.sampler.sample_device(&hidden, rows, &mut out).unwrap();
        out
    }

    pub(crate) fn enqueue(
        &mut self,
        hidden: DeviceMatrix,
        (columns, out): (RowColumns, TokenColumns),
    ) -> Result<(), SampleError> {
        // SAFETY: all arrays are on this GPU, with an element a row. The tests keep them until all calls and graphs have
        // run, and use one stream for all calls of a rank.
        let call = unsafe { ColumnCall::new(&self.stream, hidden, columns, out) };
        self.sampler.enqueue(&call)
    }
}

/// Makes a group of ranks with these shards, one thread for each rank, because the handshake is collective.
pub(crate) fn group_of(
    factory: GpuRanks,
    heads: Vec<Head<'_>>,
    input: Matrix<'_>,
    plan: Plan,
    limit: Duration,
) -> Vec<OnRank> {
    let transports = Loopback::group(heads.len());
    thread::scope(|scope| {
        let join = |(shard, transport): (_, Loopback)| {
            let device = factory.gpus.device(transport.rank());
            let options = CudaRankOptions { device, exchange: factory.exchange };
            scope.spawn(move || {
                let transport = transport.with_time_limit(limit);
                let Rank { sampler, on_device } = in_place(shard, plan, transport, &options).unwrap();
                let (stream, held) = on_device.unwrap();
                let (memory, hidden) = copied(input, &stream);
                stream.synchronize().unwrap();
                OnRank { sampler, stream, hidden, _held: (held, memory) }
            })
        };
        let threads: Vec<_> = heads.into_iter().zip(transports).map(join).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Calls `of` with each rank, in a thread for each, and returns the results.
pub(crate) fn each_rank<R: Send>(ranks: &mut [OnRank], of: impl Fn(usize, &mut OnRank) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let of = &of;
        let threads: Vec<_> =
            ranks.iter_mut().enumerate().map(|(number, rank)| scope.spawn(move || of(number, rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Prepares calls with all kinds of arrays on all ranks; without `gathers`, only calls on single logits.
pub(crate) fn prepare(ranks: &mut [OnRank], max_adjusted: usize, gathers: bool) {
    let top_p = if gathers { DeviceAddress::new(4) } else { DeviceAddress::NULL };
    let (columns, out) = (RowColumns { top_p, ..RowColumns::default() }, TokenColumns::default());
    each_rank(ranks, |_, rank| rank.sampler.prepare_enqueue(&columns, &out, max_adjusted).unwrap());
}

/// Makes a call of all ranks with the hidden states of some rows, and waits for all ranks.
pub(crate) fn call(ranks: &mut [OnRank], rows: Range<usize>, arrays: &[OnRankArrays]) {
    let calls: Vec<_> = arrays.iter().map(|arrays| (arrays.columns, arrays.out)).collect();
    each_rank(ranks, |number, rank| {
        let hidden = rank.states(rows.clone());
        rank.enqueue(hidden, calls[number]).unwrap();
        rank.sampler.wait(&rank.stream).unwrap();
    });
}

/// Compares the results of all ranks with the draws of one GPU: status, token and score by their bits, and so the logit
/// by peers. By NCCL, the logit is score minus noise, so it may differ by a rounding.
pub(crate) fn check(ranks: &[OnRank], arrays: &[OnRankArrays], want: &Samples, exchange: GpuExchange, what: &str) {
    for (number, (rank, arrays)) in ranks.iter().zip(arrays).enumerate() {
        let found = arrays.results.read(&rank.stream);
        assert!(found.len() >= want.len(), "{what}");
        for (r, (want, (status, token, score, logit))) in want.iter().zip(found).enumerate() {
            let want = want.unwrap().draws[0];
            let of = format!("{what}, rank {number}, row {r}");
            let drawn = (status::DRAWN, i64::from(want.token), want.score.to_bits());
            assert_eq!((status, token, score.to_bits()), drawn, "{of}");
            let rounding = 1e-6 * (want.score.abs() + want.logit.abs() + 1.0);
            match exchange {
                GpuExchange::Peers => assert_eq!(logit.to_bits(), want.logit.to_bits(), "{of}"),
                _ => assert!((logit - want.logit).abs() <= rounding, "{of}: {logit}, {}", want.logit),
            }
        }
    }
}
