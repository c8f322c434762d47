//! Log-probabilities and kept tokens of calls of ranks that do not wait.

use super::backends::gpu_columns::{Arrays, Results, VOCAB, histories, mask, rows};
use super::backends::gpu_logprobs;
use super::backends::gpu_memory::{Copied, captured, copied};
use super::backends::gpu_ranks::GpuRanks;
use super::backends::rank_tests::of_cuda;
use super::group;
use super::rank_group::{call, prepare};
use super::{TIME_LIMIT, load_kernels};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_core::{DType, Plan};
use flash_sampling_cuda::Device;
use flash_sampling_cuda::abi::TokenColumns;
use flash_sampling_cuda::cudarc::driver::CudaStream;
use std::sync::Arc;

/// The results of a call with the arrays of `out`, and with log-probabilities and kept tokens.
fn columns(whole: &gpu_logprobs::Results, out: TokenColumns, stream: &CudaStream) -> TokenColumns {
    let TokenColumns { processed, raw, kept, .. } = whole.columns(stream);
    TokenColumns { processed, raw, kept, ..out }
}

/// Log-probabilities, ranks, the most probable tokens, given tokens of two shards, and kept tokens have the bits of one
/// GPU, in calls and in a graph.
pub(crate) fn are_those_of_one_gpu(factory: GpuRanks) {
    let (mask, histories, count) = (mask(VOCAB), histories(), 40);
    let problem = Problem::gaussian(Size::new(count, VOCAB, 136), DType::BF16, DType::BF16, 23);
    let plan = Plan { max_rows: count, ..Plan::default() };
    load_kernels(&problem, plan);
    let device = Device::new(0).unwrap();
    let mut alone = Copied::on(&device, device.context().new_stream().unwrap(), problem.head(), plan).unwrap();
    let (_memory, hidden) = copied(problem.input(), &alone.stream);
    let mut ranks = group(factory, &problem, plan, TIME_LIMIT);
    prepare(&mut ranks, 256, true);
    let rows = rows(count, &mask, &histories);
    let whole_rows = |stream: &Arc<CudaStream>| gpu_logprobs::Results::new(count, 4, 1 << 18, stream);
    let (results, of_one) = (Results::new(count, &alone.stream), whole_rows(&alone.stream));
    let out = columns(&of_one, results.columns(&alone.stream), &alone.stream);
    let arrays = Arrays::of(&rows, VOCAB, &alone.stream);
    alone.enqueue(&hidden, &arrays, &out, 256);
    let want = (results.read(&alone.stream), of_one.bits(&alone.stream));
    for is_captured in [false, true] {
        let mut arrays: Vec<_> = ranks.iter().map(|rank| rank.arrays(&rows, VOCAB)).collect();
        let whole: Vec<_> = ranks.iter().map(|rank| whole_rows(&rank.stream)).collect();
        for ((rank, arrays), whole) in ranks.iter().zip(&mut arrays).zip(&whole) {
            arrays.out = columns(whole, arrays.out, &rank.stream);
            rank.stream.synchronize().unwrap();
        }
        if is_captured {
            let graphs: Vec<_> = ranks
                .iter_mut()
                .zip(&arrays)
                .map(|(rank, arrays)| {
                    let (stream, hidden) = (rank.stream.clone(), rank.hidden);
                    captured(&stream, || rank.enqueue(hidden, (arrays.columns, arrays.out)).map_err(of_cuda))
                })
                .collect();
            for _ in 0..3 {
                graphs.iter().for_each(|graph| graph.launch().unwrap());
            }
            ranks.iter_mut().for_each(|rank| rank.sampler.wait(&rank.stream).unwrap());
        } else {
            call(&mut ranks, 0..count, &arrays);
        }
        for (rank, (arrays, whole)) in ranks.iter().zip(arrays.iter().zip(&whole)) {
            let found = (arrays.results.read(&rank.stream), whole.bits(&rank.stream));
            assert!(found == want, "captured: {is_captured}: {found:?}, {want:?}");
        }
    }
    let begin = &want.1.2;
    assert!(begin.last().is_some_and(|&kept| kept > 100), "{begin:?}");
    drop_outside_captures((alone, ranks));
}
