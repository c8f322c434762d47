//! Parameters and results of calls that do not wait, as arrays in device memory.

use flash_sampling_core::{History, RowParams, Samples};
use flash_sampling_cuda::DeviceAddress;
use flash_sampling_cuda::abi::{RowColumns, TokenColumns, TokenLists, status};
use flash_sampling_cuda::cudarc::driver::{CudaSlice, CudaStream, DeviceRepr};
use std::any::Any;
use std::sync::Arc;

/// The vocabulary of [`rows`]: a multiple of 4, for kernels that read 16 bytes at a time.
pub(crate) const VOCAB: usize = 3004;

/// Arrays of parameters in device memory.
pub(crate) struct Arrays {
    stream: Arc<CudaStream>,
    pub(crate) columns: RowColumns,
    held: Vec<Box<dyn Any + Send>>,
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
    statuses: CudaSlice<u32>,
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

    /// Waits for the stream, and returns status, token, score and logit of each row.
    pub(crate) fn read(&self, stream: &Arc<CudaStream>) -> Vec<(u32, i64, f32, f32)> {
        let (tokens, statuses) = (stream.clone_dtoh(&self.tokens).unwrap(), stream.clone_dtoh(&self.statuses).unwrap());
        let (scores, logits) = (stream.clone_dtoh(&self.scores).unwrap(), stream.clone_dtoh(&self.logits).unwrap());
        stream.synchronize().unwrap();
        let drawn = tokens.into_iter().zip(scores).zip(logits);
        statuses.into_iter().zip(drawn).map(|(status, ((token, score), logit))| (status, token, score, logit)).collect()
    }

    /// Compares the results with draws of calls that wait.
    pub(crate) fn check(&self, want: &Samples, stream: &Arc<CudaStream>, what: &str) {
        for (r, (want, (status, token, score, logit))) in want.iter().zip(self.read(stream)).enumerate() {
            let want = want.unwrap().draws[0];
            let found = (status, token, score.to_bits(), logit.to_bits());
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
