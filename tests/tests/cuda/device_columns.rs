//! Calls of `DeviceSampler::enqueue`: parameters and results in device memory, without a wait.

use super::backends::gpu_memory::{Copied, captured, copied};
use super::runs_here;
use flash_sampling_conformance::problem::{Problem, Size};
use flash_sampling_conformance::suite::drop_outside_captures;
use flash_sampling_core::{DType, History, Knob, Plan, RowParams, Samples};
use flash_sampling_cuda::abi::{RowColumns, TokenColumns, TokenLists, invalid_parameter, status};
use flash_sampling_cuda::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr};
use flash_sampling_cuda::{Device, DeviceAddress, DeviceMatrix};
use std::any::Any;
use std::sync::Arc;

pub(crate) const VOCAB: usize = 3001;

/// Arrays of parameters in device memory.
pub(crate) struct Arrays {
    stream: Arc<CudaStream>,
    pub(crate) columns: RowColumns,
    held: Vec<Box<dyn Any>>,
}

impl Arrays {
    fn array<T: DeviceRepr + Copy + 'static>(&mut self, values: Vec<T>) -> DeviceAddress<T> {
        let memory = self.stream.clone_htod(&values).unwrap();
        let address = DeviceAddress::of(&memory, &self.stream);
        self.held.push(Box::new(memory));
        address
    }

    /// Lists in CSR form.
    fn lists(&mut self, lists: Vec<Vec<i32>>) -> TokenLists {
        let ends = lists.iter().scan(0, |end, list| {
            *end += list.len() as i64;
            Some(*end)
        });
        let offsets: Vec<i64> = [0].into_iter().chain(ends).collect();
        let begin = self.array(offsets);
        // An allocation has at least one element.
        let tokens = self.array(lists.concat().into_iter().chain([-1]).collect());
        TokenLists { begin, end: begin.add(1), tokens }
    }

    /// The values of a parameter, unless all rows have its default.
    fn unless_default<T: DeviceRepr + Copy + PartialEq + 'static>(
        &mut self,
        rows: &[RowParams<'_>],
        of: fn(&RowParams<'_>) -> T,
    ) -> DeviceAddress<T> {
        let default = of(&RowParams::default());
        let values: Vec<T> = rows.iter().map(of).collect();
        if values.iter().all(|value| *value == default) { DeviceAddress::NULL } else { self.array(values) }
    }

    /// The lists of rows, unless all are empty.
    fn unless_empty(&mut self, rows: &[RowParams<'_>], of: impl Fn(&RowParams<'_>) -> Vec<i32>) -> TokenLists {
        let lists: Vec<_> = rows.iter().map(of).collect();
        if lists.iter().all(Vec::is_empty) { TokenLists::default() } else { self.lists(lists) }
    }

    /// The arrays of rows that differ from the default, and their masks, for a vocabulary of `vocab` tokens.
    pub(crate) fn of(rows: &[RowParams<'_>], vocab: usize, stream: &Arc<CudaStream>) -> Arrays {
        let mut arrays = Arrays { stream: stream.clone(), columns: RowColumns::default(), held: Vec::new() };
        let ids = |tokens: &[u32]| tokens.iter().map(|&token| token as i32).collect::<Vec<_>>();
        let words = vocab.div_ceil(32);
        let mask = |row: &RowParams<'_>| row.mask.map_or_else(|| vec![!0; words], <[u32]>::to_vec);
        let output = |row: &RowParams<'_>| row.history.map_or(Vec::new(), |history| ids(history.output()));
        let prompt = |row: &RowParams<'_>| {
            row.history
                .map_or(Vec::new(), |history| ids(&history.tokens()[..history.tokens().len() - history.output().len()]))
        };
        let biases: Vec<f32> = rows.iter().flat_map(|row| row.logit_bias).map(|bias| bias.1).collect();
        arrays.columns = RowColumns {
            seed: arrays.unless_default(rows, |row| row.seed),
            position: arrays.unless_default(rows, |row| row.position),
            temperature: arrays.unless_default(rows, |row| row.temperature),
            top_k: arrays.unless_default(rows, |row| row.top_k as i32),
            top_p: arrays.unless_default(rows, |row| row.top_p),
            min_p: arrays.unless_default(rows, |row| row.min_p),
            repetition_penalty: arrays.unless_default(rows, |row| row.repetition_penalty),
            frequency_penalty: arrays.unless_default(rows, |row| row.frequency_penalty),
            presence_penalty: arrays.unless_default(rows, |row| row.presence_penalty),
            min_tokens: arrays.unless_default(rows, |row| row.min_tokens as i32),
            mask: match rows.iter().any(|row| row.mask.is_some()) {
                true => arrays.array(rows.iter().flat_map(mask).collect()),
                false => DeviceAddress::NULL,
            },
            mask_stride: words as u64,
            mask_words: words as u32,
            logit_bias: arrays.unless_empty(rows, |row| row.logit_bias.iter().map(|bias| bias.0 as i32).collect()),
            logit_bias_values: if biases.is_empty() { DeviceAddress::NULL } else { arrays.array(biases) },
            banned: arrays.unless_empty(rows, |row| ids(row.banned)),
            stop_tokens: arrays.unless_empty(rows, |row| ids(row.stop_token_ids)),
            prompt: arrays.unless_empty(rows, prompt),
            output: arrays.unless_empty(rows, output),
            ..RowColumns::default()
        };
        arrays
    }
}

/// The results of a call.
pub(crate) struct Results {
    pub(crate) tokens: CudaSlice<i64>,
    scores: CudaSlice<f32>,
    logits: CudaSlice<f32>,
    pub(crate) statuses: CudaSlice<u32>,
}

impl Results {
    pub(crate) fn new(rows: usize, stream: &Arc<CudaStream>) -> Results {
        Results {
            tokens: stream.clone_htod(&vec![-7i64; rows]).unwrap(),
            scores: stream.clone_htod(&vec![f32::NAN; rows]).unwrap(),
            logits: stream.clone_htod(&vec![f32::NAN; rows]).unwrap(),
            statuses: stream.clone_htod(&vec![!0u32; rows]).unwrap(),
        }
    }

    pub(crate) fn columns(&self, stream: &CudaStream) -> TokenColumns {
        TokenColumns {
            tokens: DeviceAddress::of(&self.tokens, stream),
            scores: DeviceAddress::of(&self.scores, stream),
            logits: DeviceAddress::of(&self.logits, stream),
            statuses: DeviceAddress::of(&self.statuses, stream),
            ..TokenColumns::default()
        }
    }

    /// Compares the results with draws of calls that wait.
    pub(crate) fn check(&self, want: &Samples, stream: &Arc<CudaStream>, what: &str) {
        let (tokens, statuses) = (stream.clone_dtoh(&self.tokens).unwrap(), stream.clone_dtoh(&self.statuses).unwrap());
        let (scores, logits) = (stream.clone_dtoh(&self.scores).unwrap(), stream.clone_dtoh(&self.logits).unwrap());
        stream.synchronize().unwrap();
        for (r, want) in want.iter().enumerate() {
            let want = want.unwrap().draws[0];
            let found = (statuses[r], tokens[r], scores[r].to_bits(), logits[r].to_bits());
            let want = (status::DRAWN, i64::from(want.token), want.score.to_bits(), want.logit.to_bits());
            assert_eq!(found, want, "{what}, row {r}");
        }
    }
}

/// A mask for [`rows`].
pub(crate) fn mask(vocab: usize) -> Vec<u32> {
    (0..vocab.div_ceil(32) as u32).map(|word| 0x9e37_79b9u32.wrapping_mul(word + 1)).collect()
}

/// Histories for [`rows`].
pub(crate) fn histories() -> Vec<History> {
    let history = |h: u32| {
        let mut history = History::new(&(0..40).map(|t| (t * t + h) % VOCAB as u32).collect::<Vec<_>>());
        history.extend((0..30 * h).map(|t| (t * 7 + h) % 100));
        history
    };
    (0..5).map(history).collect()
}

/// Rows with every parameter of [`RowColumns`].
pub(crate) fn rows<'a>(count: usize, mask: &'a [u32], histories: &'a [History]) -> Vec<RowParams<'a>> {
    let row = |r: usize| {
        let base = RowParams { seed: 40 + r as u64, position: r as u64, temperature: 0.9, ..RowParams::default() };
        let history = Some(&histories[r % histories.len()]);
        match r % 11 {
            0 => base,
            1 => RowParams { temperature: 0.0, ..base },
            2 => RowParams { top_k: 20, ..base },
            3 => RowParams { top_p: 0.9, ..base },
            4 => RowParams { min_p: 0.05, mask: Some(mask), ..base },
            5 => RowParams { repetition_penalty: 1.3, frequency_penalty: 0.2, history, ..base },
            6 => RowParams { presence_penalty: 0.5, logit_bias: &[(3, 2.0), (1700, 1.0)], history, ..base },
            7 => {
                RowParams { banned: &[5, 6, 2000], stop_token_ids: &[9], min_tokens: 40, top_k: 50, top_p: 0.8, ..base }
            }
            8 => RowParams { mask: Some(mask), frequency_penalty: -0.3, history, ..base },
            // Min-p keeps more tokens than fit into the list of the first pass.
            9 => RowParams { temperature: 20.0, min_p: 0.1, top_p: 0.9, ..base },
            _ => RowParams { temperature: 20.0, min_p: 0.2, top_k: 900, top_p: 0.7, mask: Some(mask), ..base },
        }
    };
    (0..count).map(row).collect()
}

#[test]
fn calls_that_do_not_wait_have_the_bits_of_calls_that_do() {
    if !runs_here() {
        return;
    }
    let (mask, histories) = (mask(VOCAB), histories());
    // More rows than a launch has.
    let count = 300;
    let problem = Problem::gaussian(Size::new(count, VOCAB, 136), DType::BF16, DType::BF16, 17);
    let plan = Plan { max_rows: count, ..Plan::default() };
    let mut there = Copied::new(problem.head(), plan).unwrap();
    let (_memory, hidden) = copied(problem.input(), &there.stream);
    let all = rows(count, &mask, &histories);
    // Calls of one row have few arrays, so they differ in kernels.
    for which in [0..count, 0..17, 0..1, 1..2, 2..3, 3..4, 4..5, 5..6, 6..7, 7..8, 8..9, 9..10, 10..11] {
        let rows = &all[which.clone()];
        let hidden = DeviceMatrix {
            address: hidden.address.add(which.start * hidden.row_stride * hidden.dtype.block_bytes()),
            rows: rows.len(),
            ..hidden
        };
        let mut want = Samples::new();
        // SAFETY: the hidden states are on this device, and this call waits.
        unsafe { there.sampler.sample(&there.stream, &hidden, rows, &mut want) }.unwrap();
        let arrays = Arrays::of(rows, VOCAB, &there.stream);
        let results = Results::new(rows.len(), &there.stream);
        there.sampler.prepare_enqueue(&arrays.columns, &results.columns(&there.stream), 256).unwrap();
        // SAFETY: all arrays are on this device, with an element a row, and live until the results are compared.
        unsafe { there.sampler.enqueue(&there.stream, &hidden, &arrays.columns, &results.columns(&there.stream)) }
            .unwrap();
        results.check(&want, &there.stream, &format!("{which:?}"));
    }
    drop_outside_captures(there);
}

#[test]
fn a_captured_call_reads_its_parameters_when_it_runs() {
    if !runs_here() {
        return;
    }
    let problem = Problem::gaussian(Size::new(9, VOCAB, 136), DType::BF16, DType::BF16, 18);
    let device = Device::new(0).unwrap();
    let stream = device.context().new_stream().unwrap();
    let mut there = Copied::on(&device, stream, problem.head(), Plan { max_rows: 9, ..Plan::default() }).unwrap();
    let (_memory, hidden) = copied(problem.input(), &there.stream);
    let (mut positions, temperatures) = (there.stream.alloc_zeros::<u64>(9).unwrap(), vec![0.7f32; 9]);
    let temperatures = there.stream.clone_htod(&temperatures).unwrap();
    let top_k = there.stream.clone_htod(&[0i32, 10, 0, 20, 0, 1, 0, 50, 0]).unwrap();
    let columns = RowColumns {
        position: DeviceAddress::of(&positions, &there.stream),
        temperature: DeviceAddress::of(&temperatures, &there.stream),
        top_k: DeviceAddress::of(&top_k, &there.stream),
        ..RowColumns::default()
    };
    let results = Results::new(9, &there.stream);
    let out = results.columns(&there.stream);
    there.sampler.prepare_enqueue(&columns, &out, 0).unwrap();
    there.stream.synchronize().unwrap();
    let (sampler, stream) = (&mut there.sampler, there.stream.clone());
    // SAFETY: all arrays are on this device, with an element a row, and outlive the graph.
    let graph = captured(&stream, || unsafe { sampler.enqueue(&stream, &hidden, &columns, &out) });
    let mut tokens = Vec::new();
    for step in 0..4u64 {
        let rows: Vec<_> = [0u32, 10, 0, 20, 0, 1, 0, 50, 0]
            .into_iter()
            .enumerate()
            .map(|(r, top_k)| RowParams {
                position: 100 * step + r as u64,
                temperature: 0.7,
                top_k,
                ..RowParams::default()
            })
            .collect();
        stream.memcpy_htod(&rows.iter().map(|row| row.position).collect::<Vec<_>>(), &mut positions).unwrap();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        let mut want = Samples::new();
        // SAFETY: the hidden states are on this device, and this call waits.
        unsafe { there.sampler.sample(&stream, &hidden, &rows, &mut want) }.unwrap();
        results.check(&want, &stream, &format!("step {step}"));
        tokens.push(stream.clone_dtoh(&results.tokens).unwrap());
    }
    assert!(tokens.windows(2).all(|pair| pair[0] != pair[1]), "{tokens:?}");
    drop(graph);
    drop_outside_captures(there);
}

#[test]
fn an_invalid_parameter_is_its_rows_status_alone() {
    if !runs_here() {
        return;
    }
    let problem = Problem::gaussian(Size::new(6, VOCAB, 136), DType::BF16, DType::BF16, 19);
    let mut there = Copied::new(problem.head(), Plan { max_rows: 6, ..Plan::default() }).unwrap();
    let (_memory, hidden) = copied(problem.input(), &there.stream);
    let valid: Vec<_> = (0..6).map(|seed| RowParams { seed, ..RowParams::default() }).collect();
    let mut want = Samples::new();
    // SAFETY: the hidden states are on this device, and this call waits.
    unsafe { there.sampler.sample(&there.stream, &hidden, &valid, &mut want) }.unwrap();
    let mut rows = valid;
    (rows[1].temperature, rows[4].top_p) = (f32::NAN, 2.0);
    rows[2].banned = &[1, 2, 3];
    let arrays = Arrays::of(&rows, VOCAB, &there.stream);
    let results = Results::new(6, &there.stream);
    // Room for fewer adjusted tokens than row 2 has.
    there.sampler.prepare_enqueue(&arrays.columns, &results.columns(&there.stream), 2).unwrap();
    // SAFETY: all arrays are on this device, with an element a row, and live until the results are read.
    unsafe { there.sampler.enqueue(&there.stream, &hidden, &arrays.columns, &results.columns(&there.stream)) }.unwrap();
    let (tokens, statuses) =
        (there.stream.clone_dtoh(&results.tokens).unwrap(), there.stream.clone_dtoh(&results.statuses).unwrap());
    there.stream.synchronize().unwrap();
    for r in 0..6 {
        let expected = match r {
            1 => (-1, status::PARAMETERS, Some(Knob::Temperature)),
            2 => (-1, status::PARAMETERS, None),
            4 => (-1, status::PARAMETERS, Some(Knob::TopP)),
            _ => (i64::from(want.row(r).unwrap().token()), status::DRAWN, None),
        };
        assert_eq!((tokens[r], statuses[r] & 0xff, invalid_parameter(statuses[r])), expected, "row {r}");
    }
    drop_outside_captures(there);
}
