//! Log-probabilities and kept tokens of `DeviceSampler::enqueue`, against those of calls that wait.

use super::backends::gpu_columns::{Arrays, histories, mask, rows};
use super::backends::gpu_memory::{Copied, captured, copied};
use super::device_logits::{TYPES, logits, placed};
use super::runs_here;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_core::{DType, LogprobsMode, Plan, RowParams, RowSample, Samples};
use flash_sampling_cuda::abi::{KeptColumns, LogprobColumns, RowColumns, TokenColumns};
use flash_sampling_cuda::cudarc::driver::{CudaSlice, CudaStream};
use flash_sampling_cuda::{Device, DeviceAddress, DeviceMatrix, DeviceSampler};
use std::sync::Arc;

const TOP_N: usize = 20;
/// Tokens with requested log-probabilities.
const GIVEN: [u32; 3] = [0, 77, 200];

/// The results of a call in one law.
struct Law {
    log_z: CudaSlice<f64>,
    log_probs: CudaSlice<f32>,
    ranks: CudaSlice<i32>,
    top_tokens: CudaSlice<i32>,
    top_log_probs: CudaSlice<f32>,
    token_ids: CudaSlice<i64>,
    token_log_probs: CudaSlice<f32>,
}

/// The GPU's logarithm may differ in its last bit, and so may a log-probability.
fn assert_near(found: f64, want: f64, what: &str) {
    let is_near = (found - want).abs() <= 1e-14 * (1.0 + want.abs()) + f64::from(f32::EPSILON) / 2.0 * want.abs();
    assert!(found == want || is_near, "{what}: {found:e} against {want:e}");
}

impl Law {
    fn new(rows: usize, stream: &Arc<CudaStream>) -> Law {
        Law {
            log_z: stream.clone_htod(&vec![f64::NAN; rows]).unwrap(),
            log_probs: stream.clone_htod(&vec![f32::NAN; rows]).unwrap(),
            ranks: stream.clone_htod(&vec![-7; rows]).unwrap(),
            top_tokens: stream.clone_htod(&vec![-7; rows * TOP_N]).unwrap(),
            top_log_probs: stream.clone_htod(&vec![f32::NAN; rows * TOP_N]).unwrap(),
            token_ids: stream.clone_htod(&GIVEN.map(i64::from).repeat(rows)).unwrap(),
            token_log_probs: stream.clone_htod(&vec![f32::NAN; rows * GIVEN.len()]).unwrap(),
        }
    }

    fn columns(&self, stream: &CudaStream) -> LogprobColumns {
        LogprobColumns {
            log_z: DeviceAddress::of(&self.log_z, stream),
            log_probs: DeviceAddress::of(&self.log_probs, stream),
            ranks: DeviceAddress::of(&self.ranks, stream),
            top_tokens: DeviceAddress::of(&self.top_tokens, stream),
            top_log_probs: DeviceAddress::of(&self.top_log_probs, stream),
            token_ids: DeviceAddress::of(&self.token_ids, stream),
            token_log_probs: DeviceAddress::of(&self.token_log_probs, stream),
            top_n: TOP_N as u32,
            token_count: GIVEN.len() as u32,
        }
    }

    /// Compares the results with those of a call that waits.
    fn check(&self, want: &Samples, stream: &Arc<CudaStream>, what: &str) {
        let (log_z, log_probs) = (stream.clone_dtoh(&self.log_z).unwrap(), stream.clone_dtoh(&self.log_probs).unwrap());
        let ranks = stream.clone_dtoh(&self.ranks).unwrap();
        let top_tokens = stream.clone_dtoh(&self.top_tokens).unwrap();
        let top_log_probs = stream.clone_dtoh(&self.top_log_probs).unwrap();
        let token_log_probs = stream.clone_dtoh(&self.token_log_probs).unwrap();
        stream.synchronize().unwrap();
        for (r, want) in want.iter().enumerate() {
            let what = format!("{what}, row {r}");
            let none = (f64::NEG_INFINITY, f64::NEG_INFINITY, 0, Vec::new(), vec![f64::NEG_INFINITY; GIVEN.len()]);
            let of_row = |row: RowSample<'_>| {
                let top = row.top_log_probs().map(|(token, nats)| (token as i32, nats)).collect();
                let tokens = row.token_log_probs().map(|(_, nats)| nats).collect();
                (row.log_z.unwrap(), row.draw_log_prob(0).unwrap(), row.ranks[0] as i32, top, tokens)
            };
            let (want_z, want_log_prob, want_rank, mut want_top, tokens): (_, _, _, Vec<_>, Vec<_>) =
                want.map_or(none, of_row);
            assert_near(log_z[r], want_z, &format!("{what}: log Z"));
            assert_near(f64::from(log_probs[r]), want_log_prob, &format!("{what}: log-probability"));
            assert_eq!(ranks[r], want_rank, "{what}: rank");
            for (i, &nats) in tokens.iter().enumerate() {
                let found = f64::from(token_log_probs[r * GIVEN.len() + i]);
                assert_near(found, nats, &format!("{what}: log-probability of token {}", GIVEN[i]));
            }
            want_top.resize(TOP_N, (-1, f64::NEG_INFINITY));
            for (i, (token, nats)) in want_top.into_iter().enumerate() {
                assert_eq!(top_tokens[r * TOP_N + i], token, "{what}: token {i} of the most probable");
                assert_near(f64::from(top_log_probs[r * TOP_N + i]), nats, &format!("{what}: log-probability {i}"));
            }
        }
    }
}

/// The results of a call: both laws, and the kept tokens.
struct Results {
    tokens: CudaSlice<i64>,
    laws: [Law; 2],
    begin: CudaSlice<i64>,
    kept: CudaSlice<i32>,
}

impl Results {
    fn new(rows: usize, capacity: usize, stream: &Arc<CudaStream>) -> Results {
        Results {
            tokens: stream.clone_htod(&vec![-7i64; rows]).unwrap(),
            laws: [Law::new(rows, stream), Law::new(rows, stream)],
            begin: stream.clone_htod(&vec![-7i64; rows + 1]).unwrap(),
            kept: stream.clone_htod(&vec![-7; capacity]).unwrap(),
        }
    }

    fn columns(&self, stream: &CudaStream) -> TokenColumns {
        let [processed, raw] = &self.laws;
        TokenColumns {
            tokens: DeviceAddress::of(&self.tokens, stream),
            processed: processed.columns(stream),
            raw: raw.columns(stream),
            kept: KeptColumns {
                begin: DeviceAddress::of(&self.begin, stream),
                tokens: DeviceAddress::of(&self.kept, stream),
                capacity: self.kept.len() as u64,
            },
            ..TokenColumns::default()
        }
    }

    /// Compares the results with those of calls that wait, in both laws. Returns the number of kept tokens.
    fn check(&self, want: &[Samples; 2], stream: &Arc<CudaStream>, what: &str) -> usize {
        let tokens = stream.clone_dtoh(&self.tokens).unwrap();
        let (begin, kept) = (stream.clone_dtoh(&self.begin).unwrap(), stream.clone_dtoh(&self.kept).unwrap());
        for ((law, want), name) in self.laws.iter().zip(want).zip(["processed", "raw"]) {
            law.check(want, stream, &format!("{what}, {name}"));
        }
        let mut end = 0;
        for (r, want) in want[0].iter().enumerate() {
            assert_eq!(tokens[r], want.map_or(-1, |row| i64::from(row.token())), "{what}, row {r}");
            assert_eq!(begin[r], end as i64, "{what}: begin of row {r}");
            let bitmap = want.ok().and_then(|row| row.kept).map_or(&[][..], |kept| kept.tokens);
            let is_kept = |token: &usize| bitmap[token / 32] >> (token % 32) & 1 == 1;
            for token in (0..32 * bitmap.len()).filter(is_kept) {
                // Tokens beyond the capacity are not written.
                assert!(end >= kept.len() || kept[end] == token as i32, "{what}: kept token {token} of row {r}");
                end += 1;
            }
        }
        assert_eq!(begin.last(), Some(&(end as i64)), "{what}");
        assert!(kept.iter().skip(end).all(|&token| token == -7), "{what}: a token beyond the lists");
        end
    }
}

/// Returns the results of calls that wait, in both laws.
fn waited(
    sampler: &mut DeviceSampler,
    input: &DeviceMatrix,
    rows: &[RowParams<'_>],
    stream: &CudaStream,
) -> [Samples; 2] {
    [LogprobsMode::Processed, LogprobsMode::Raw].map(|logprobs_mode| {
        let (mut rows, mut out) = (rows.to_vec(), Samples::new());
        for row in &mut rows {
            (row.logprobs, row.logprobs_mode, row.ranks) = (Some(TOP_N as u32), logprobs_mode, true);
            row.logprob_token_ids = &GIVEN;
            row.kept = row.temperature > 0.0 && (row.top_k > 0 || row.top_p < 1.0 || row.min_p > 0.0);
        }
        // SAFETY: the input is on this device, and this call waits.
        unsafe { sampler.sample(stream, input, &rows, &mut out) }.unwrap();
        out
    })
}

/// Compares a call that does not wait with calls that do.
fn check(
    sampler: &mut DeviceSampler,
    input: &DeviceMatrix,
    (rows, vocab): (&[RowParams<'_>], usize),
    stream: &Arc<CudaStream>,
    what: &str,
) {
    let want = waited(sampler, input, rows, stream);
    let arrays = Arrays::of(rows, vocab, stream);
    let mut capacity = vocab * rows.len();
    // First with room for all kept tokens, then for half of them.
    for _ in 0..2 {
        let results = Results::new(rows.len(), capacity.max(1), stream);
        let out = results.columns(stream);
        sampler.prepare_enqueue(&arrays.columns, &out, 256).unwrap();
        // SAFETY: all arrays are on this device, with their elements, and live until the results are compared.
        unsafe { sampler.enqueue(stream, input, &arrays.columns, &out) }.unwrap();
        capacity = results.check(&want, stream, what) / 2;
    }
}

/// The Hopper kernel stores raw logits. The plain kernel, for float32, stores them on request.
#[test]
fn log_probabilities_and_kept_tokens_are_those_of_calls_that_wait() {
    if !runs_here() {
        return;
    }
    // Summaries of three blocks.
    let vocab = 20_003;
    let (mask, histories) = (mask(vocab), histories());
    let none = vec![0; mask.len()];
    for (dtype, count) in [(DType::BF16, 300), (DType::F32, 40)] {
        let problem = Problem::gaussian(Size::new(count, vocab, 136), dtype, dtype, 23);
        let plan = Plan { max_rows: count, max_logprobs: Some(TOP_N as u32), ..Plan::default() };
        let mut there = Copied::new(problem.head(), plan).unwrap();
        let (_memory, hidden) = copied(problem.input(), &there.stream);
        let mut all = rows(count, &mask, &histories);
        // Rows without a draw.
        (all[11].mask, all[12].top_p) = (Some(&none[..]), 2.0);
        // One row per kind of `rows`, so that calls have few arrays.
        for which in [0..count, 0..17].into_iter().chain((0..11).map(|r| r..r + 1)) {
            let rows = &all[which.clone()];
            let hidden = DeviceMatrix {
                address: hidden.address.add(which.start * hidden.row_stride * hidden.dtype.block_bytes()),
                rows: rows.len(),
                ..hidden
            };
            let what = format!("{which:?}, {}", dtype.name());
            check(&mut there.sampler, &hidden, (rows, vocab), &there.stream, &what);
        }
        drop_outside_captures(there);
    }
}

#[test]
fn log_probabilities_of_logits_in_device_memory_are_those_of_calls_that_wait() {
    if !runs_here() {
        return;
    }
    let device = Device::new(0).unwrap();
    let stream = device.context().new_stream().unwrap();
    // More rows than a launch has.
    let (count, vocab) = (270, 20_003);
    let (mask, histories) = (mask(vocab), histories());
    let all = rows(count, &mask, &histories);
    let plan = Plan { max_rows: count, max_logprobs: Some(TOP_N as u32), ..Plan::default() };
    for (dtype, place) in TYPES.into_iter().zip([(1, 2), (3, 5), (0, 5)]) {
        let logits = logits(dtype, count, vocab, 90);
        let (_memory, there) = placed(&logits, place, &stream);
        let mut sampler = DeviceSampler::for_logits(vocab, plan, &device).unwrap();
        // All kinds of `rows`, then rows without filters alone.
        for which in [0..count, 0..2, 5..6] {
            let address = there.address.add(which.start * there.row_stride * dtype.block_bytes());
            let part = DeviceMatrix { address, rows: which.len(), ..there };
            let what = format!("{which:?}, {}", dtype.name());
            check(&mut sampler, &part, (&all[which], vocab), &stream, &what);
        }
        drop_outside_captures(sampler);
    }
}

#[test]
fn a_captured_call_with_log_probabilities_reads_its_parameters_when_it_runs() {
    if !runs_here() {
        return;
    }
    let vocab = 20_003;
    let problem = Problem::gaussian(Size::new(9, vocab, 136), DType::BF16, DType::BF16, 24);
    let device = Device::new(0).unwrap();
    let stream = device.context().new_stream().unwrap();
    let plan = Plan { max_rows: 9, max_logprobs: Some(TOP_N as u32), ..Plan::default() };
    let mut there = Copied::on(&device, stream.clone(), problem.head(), plan).unwrap();
    let (_memory, hidden) = copied(problem.input(), &stream);
    let mut positions = stream.alloc_zeros::<u64>(9).unwrap();
    let (mut top_k, mut top_p) = (stream.alloc_zeros::<i32>(9).unwrap(), stream.alloc_zeros::<f32>(9).unwrap());
    let columns = RowColumns {
        position: DeviceAddress::of(&positions, &stream),
        top_k: DeviceAddress::of(&top_k, &stream),
        top_p: DeviceAddress::of(&top_p, &stream),
        ..RowColumns::default()
    };
    let mut results = Results::new(9, 9 * vocab, &stream);
    let out = results.columns(&stream);
    there.sampler.prepare_enqueue(&columns, &out, 0).unwrap();
    stream.synchronize().unwrap();
    let sampler = &mut there.sampler;
    // SAFETY: all arrays are on this device, with their elements, and outlive the graph.
    let graph = captured(&stream, || unsafe { sampler.enqueue(&stream, &hidden, &columns, &out) });
    for step in 0..4u32 {
        let row = |r: u32| RowParams {
            position: u64::from(100 * step + r),
            top_k: [0, 10, 900, 1][((r + step) % 4) as usize],
            top_p: [1.0, 0.9, 0.5][((r + 2 * step) % 3) as usize],
            ..RowParams::default()
        };
        let rows: Vec<_> = (0..9).map(row).collect();
        stream.memcpy_htod(&rows.iter().map(|row| row.position).collect::<Vec<_>>(), &mut positions).unwrap();
        stream.memcpy_htod(&rows.iter().map(|row| row.top_k as i32).collect::<Vec<_>>(), &mut top_k).unwrap();
        stream.memcpy_htod(&rows.iter().map(|row| row.top_p).collect::<Vec<_>>(), &mut top_p).unwrap();
        // The lists of the last step may be longer.
        stream.memcpy_htod(&vec![-7; 9 * vocab], &mut results.kept).unwrap();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        let want = waited(&mut there.sampler, &hidden, &rows, &stream);
        results.check(&want, &stream, &format!("step {step}"));
    }
    drop(graph);
    drop_outside_captures(there);
}
