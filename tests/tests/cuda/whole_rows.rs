//! Log-probabilities and kept tokens of calls of ranks that do not wait.

use super::backends::gpu_columns::{Arrays, Results, VOCAB, histories, mask, rows};
use super::backends::gpu_memory::{Copied, captured, copied};
use super::backends::gpu_ranks::GpuRanks;
use super::rank_faults::of_cuda;
use super::rank_group::{call, group, prepare};
use super::{TIME_LIMIT, load_kernels};
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_core::{DType, Plan};
use flash_sampling_cuda::abi::{KeptColumns, LogprobColumns, TokenColumns};
use flash_sampling_cuda::cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_cuda::{Device, DeviceAddress};
use std::sync::Arc;

/// Log-probabilities in both laws, and kept tokens, of a call.
struct WholeRows {
    floats: CudaSlice<f32>,
    log_z: CudaSlice<f64>,
    ints: CudaSlice<i32>,
    begin: CudaSlice<i64>,
    rows: usize,
}

impl WholeRows {
    const TOP: usize = 4;
    const KEPT: usize = 1 << 18;

    fn new(rows: usize, stream: &Arc<CudaStream>) -> WholeRows {
        let each = 1 + WholeRows::TOP;
        WholeRows {
            floats: stream.clone_htod(&vec![7f32; 2 * each * rows]).unwrap(),
            log_z: stream.clone_htod(&vec![7f64; 2 * rows]).unwrap(),
            ints: stream.clone_htod(&vec![7; 2 * each * rows + WholeRows::KEPT]).unwrap(),
            begin: stream.clone_htod(&vec![7; rows + 1]).unwrap(),
            rows,
        }
    }

    /// The results of a call, which also has the arrays of `out`.
    fn columns(&self, out: TokenColumns, stream: &CudaStream) -> TokenColumns {
        let (rows, top) = (self.rows, WholeRows::TOP);
        let (floats, ints) = (DeviceAddress::of(&self.floats, stream), DeviceAddress::of(&self.ints, stream));
        let log_z = DeviceAddress::of(&self.log_z, stream);
        let of_law = |law: usize| {
            let at = law * (1 + top) * rows;
            LogprobColumns {
                log_z: log_z.add(law * rows),
                log_probs: floats.add(at),
                top_log_probs: floats.add(at + rows),
                ranks: ints.add(at),
                top_tokens: ints.add(at + rows),
                top_n: top as u32,
                ..LogprobColumns::default()
            }
        };
        let tokens = ints.add(2 * (1 + top) * rows);
        let begin = DeviceAddress::of(&self.begin, stream);
        let kept = KeptColumns { begin, tokens, capacity: WholeRows::KEPT as u64 };
        TokenColumns { processed: of_law(0), raw: of_law(1), kept, ..out }
    }

    /// Waits for the stream, and returns the bits of all results.
    fn read(&self, stream: &Arc<CudaStream>) -> (Vec<u32>, Vec<u64>, Vec<i32>, Vec<i64>) {
        let (floats, log_z) = (stream.clone_dtoh(&self.floats).unwrap(), stream.clone_dtoh(&self.log_z).unwrap());
        let (ints, begin) = (stream.clone_dtoh(&self.ints).unwrap(), stream.clone_dtoh(&self.begin).unwrap());
        stream.synchronize().unwrap();
        (floats.iter().map(|x| x.to_bits()).collect(), log_z.iter().map(|x| x.to_bits()).collect(), ints, begin)
    }
}

/// Log-probabilities, ranks, the most probable tokens and kept tokens have the bits of one GPU, in calls and in a graph.
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
    let of_one = (Arrays::of(&rows, VOCAB, &alone.stream), WholeRows::new(count, &alone.stream));
    let results = Results::new(count, &alone.stream);
    let out = of_one.1.columns(results.columns(&alone.stream), &alone.stream);
    alone.sampler.prepare_enqueue(&of_one.0.columns, &out, 256).unwrap();
    // SAFETY: all arrays are on this device, with an element a row, and live until the results are compared.
    unsafe { alone.sampler.enqueue(&alone.stream, &hidden, &of_one.0.columns, &out) }.unwrap();
    let want = (results.read(&alone.stream), of_one.1.read(&alone.stream));
    for is_captured in [false, true] {
        let mut arrays: Vec<_> = ranks.iter().map(|rank| rank.arrays(&rows, VOCAB)).collect();
        let whole: Vec<_> = ranks.iter().map(|rank| WholeRows::new(count, &rank.stream)).collect();
        for ((rank, arrays), whole) in ranks.iter().zip(&mut arrays).zip(&whole) {
            arrays.out = whole.columns(arrays.out, &rank.stream);
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
            let found = (arrays.results.read(&rank.stream), whole.read(&rank.stream));
            assert!(found == want, "captured: {is_captured}: {found:?}, {want:?}");
        }
    }
    assert!(want.1.3.last().is_some_and(|&kept| kept > 100), "{:?}", want.1.3);
    drop_outside_captures((alone, ranks));
}
