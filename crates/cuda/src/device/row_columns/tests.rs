use super::*;
use crate::abi::{
    KeptColumns, LogprobColumns, PENALISED, Penalty, TOP_K_MAX, TOP_N_MAX, TokenLists, invalid_parameter, status,
};
use crate::emulated::{self, Input, Number, Output};
use crate::sampler::row_encoder::RowEncoder;
use flash_sampling_core::backend::{Adjustment, Adjustments};
use flash_sampling_core::{Domain, History, Knob, Noise, RowParams};

#[test]
fn arrays_that_are_present_state_the_features() {
    let lists = TokenLists { tokens: DeviceAddress::new(4), begin: DeviceAddress::new(8), end: DeviceAddress::new(16) };
    let float = DeviceAddress::<f32>::new(4);
    for (columns, features, has_filters) in [
        (RowColumns { temperature: float, ..RowColumns::default() }, RowFeatures::Bare, false),
        (RowColumns { top_p: float, ..RowColumns::default() }, RowFeatures::Bare, true),
        (RowColumns { banned: lists, min_p: float, ..RowColumns::default() }, RowFeatures::Unpenalised, true),
        (RowColumns { mask: DeviceAddress::new(4), ..RowColumns::default() }, RowFeatures::Any, false),
        (RowColumns { presence_penalty: float, ..RowColumns::default() }, RowFeatures::Any, false),
    ] {
        assert_eq!((columns.features(), columns.filter_kinds().is_some()), (features, has_filters), "{columns:?}");
        assert_eq!(columns.check(), Ok(()));
    }
}

#[test]
fn arrays_that_kernels_cannot_read_are_named() {
    let banned = TokenLists { tokens: DeviceAddress::new(4), ..TokenLists::default() };
    for (columns, name) in [
        (RowColumns { seed: DeviceAddress::new(4), ..RowColumns::default() }, "seeds"),
        (RowColumns { top_p: DeviceAddress::new(2), ..RowColumns::default() }, "top-p"),
        (RowColumns { banned, ..RowColumns::default() }, "banned tokens"),
        (RowColumns { logit_bias_values: DeviceAddress::new(4), ..RowColumns::default() }, "biases"),
    ] {
        assert!(matches!(columns.check(), Err(CudaError::Layout { what, .. }) if what == name), "{columns:?}");
    }
}

#[test]
fn results_that_kernels_cannot_write_are_named() {
    let (tokens, none) = (DeviceAddress::new(4), LogprobColumns::default());
    assert_eq!(TokenColumns { raw: LogprobColumns { top_n: TOP_N_MAX, ..none }, ..Default::default() }.check(), Ok(()));
    for (columns, name) in [
        (TokenColumns { tokens: DeviceAddress::new(4), ..Default::default() }, "tokens"),
        (
            TokenColumns { processed: LogprobColumns { log_z: DeviceAddress::new(4), ..none }, ..Default::default() },
            "log Z",
        ),
        (TokenColumns { raw: LogprobColumns { ranks: DeviceAddress::new(2), ..none }, ..Default::default() }, "ranks"),
        (TokenColumns { kept: KeptColumns { tokens, ..Default::default() }, ..Default::default() }, "kept tokens"),
    ] {
        assert!(matches!(columns.check(), Err(CudaError::Layout { what, .. }) if what == name), "{columns:?}");
    }
    let too_many = TokenColumns { raw: LogprobColumns { top_n: TOP_N_MAX + 1, ..none }, ..Default::default() };
    assert!(matches!(too_many.check(), Err(CudaError::TooLarge { .. })));
}

/// The parameters of an entry.
#[derive(Clone, Debug, Default)]
struct Entry {
    params: RowParams<'static>,
    bias: Vec<(u32, f32)>,
    banned: Vec<u32>,
    stops: Vec<u32>,
    prompt: Vec<u32>,
    output: Vec<u32>,
}

/// Writes an array, with the flag of its presence.
fn array<N: Number>(input: &mut Input, values: impl IntoIterator<Item = N>) {
    input.put(1u32);
    input.put_all(values);
}

/// Writes lists in CSR form, each with further ids; absent if all are empty.
fn lists<'a>(input: &mut Input, lists: impl Iterator<Item = &'a [u32]> + Clone, ids: &'a [u32]) {
    if lists.clone().all(<[u32]>::is_empty) {
        return input.put([0u32; 4]);
    }
    let ends: Vec<i64> = lists
        .clone()
        .scan(0, |end, list| {
            *end += (list.len() + ids.len()) as i64;
            Some(*end)
        })
        .collect();
    input.put(*ends.last().unwrap() as u32);
    array(input, [0].into_iter().chain(ends.iter().copied()).take(ends.len()));
    array(input, ends.iter().copied());
    array(input, lists.flat_map(|list| list.iter().chain(ids).copied()));
}

const FIRST_ROW: usize = 2;
const MASK_WORDS: usize = 40;
/// Ids outside of every vocabulary.
const UNKNOWN: [u32; 2] = [u32::MAX, 1 << 30];

/// A call over entries: row `r` has entry `index[r]`.
struct EncodedCall<'a> {
    entries: &'a [Entry],
    index: &'a [usize],
    tokens: Range<u32>,
    vocab_size: u32,
    capacity: usize,
}

fn mask_of(row: usize) -> Vec<u32> {
    (0..MASK_WORDS as u32).map(|word| (word + 1).wrapping_mul(0x9e37_79b9 + row as u32)).collect()
}

impl EncodedCall<'_> {
    fn position(&self, row: usize) -> u64 {
        self.entries[self.index[row]].params.position + row as u64
    }

    fn input(&self) -> Input {
        let (entries, rows) = (self.entries, self.index.len());
        let (mut to, params) = (Input::default(), || entries.iter().map(|entry| entry.params));
        to.put([FIRST_ROW, rows - FIRST_ROW, entries.len()].map(|number| number as u32));
        to.put([self.tokens.start, self.tokens.len() as u32, self.vocab_size, self.capacity as u32]);
        array(&mut to, self.index.iter().map(|&entry| entry as i32));
        array(&mut to, params().map(|row| row.seed));
        array(&mut to, (0..rows).map(|row| self.position(row)));
        array(&mut to, params().map(|row| row.temperature));
        // As some engines disable top-k.
        array(&mut to, params().map(|row| if row.top_k == 0 { -1 } else { row.top_k as i32 }));
        array(&mut to, params().map(|row| row.top_p));
        array(&mut to, params().map(|row| row.min_p));
        array(&mut to, params().map(|row| row.repetition_penalty));
        array(&mut to, params().map(|row| row.frequency_penalty));
        array(&mut to, params().map(|row| row.presence_penalty));
        array(&mut to, params().map(|row| row.min_tokens));
        to.put(MASK_WORDS as u32);
        array(&mut to, (0..rows).flat_map(|row| mask_of(row).into_iter().chain([0])));
        let tokens: Vec<Vec<u32>> =
            entries.iter().map(|entry| entry.bias.iter().map(|bias| bias.0).collect()).collect();
        lists(&mut to, tokens.iter().map(Vec::as_slice), &UNKNOWN);
        let values = |entry: &Entry| entry.bias.iter().map(|bias| bias.1).chain([0.0; 2]).collect::<Vec<_>>();
        let values: Vec<f32> = entries.iter().flat_map(values).collect();
        if entries.iter().all(|entry| entry.bias.is_empty()) {
            to.put([0u32; 2]);
        } else {
            to.put(values.len() as u32);
            array(&mut to, values);
        }
        lists(&mut to, entries.iter().map(|entry| entry.banned.as_slice()), &UNKNOWN);
        lists(&mut to, entries.iter().map(|entry| entry.stops.as_slice()), &UNKNOWN);
        lists(&mut to, entries.iter().map(|entry| entry.prompt.as_slice()), &UNKNOWN);
        lists(&mut to, entries.iter().map(|entry| entry.output.as_slice()), &[]);
        to
    }

    /// Compares the rows of the emulated kernels with the host's. Returns the number of invalid rows.
    fn check(&self, program: &std::path::Path) -> usize {
        let mut output = emulated::answer(program, self.input());
        let rows = self.index.len();
        let statuses: Vec<u32> = (FIRST_ROW..rows).map(|row| self.check_row(row, &mut output)).collect();
        let (tokens, scores): (Vec<i64>, Vec<f32>) = (output.list(rows), output.list(rows));
        let found: Vec<u32> = output.list(rows);
        assert!(output.is_empty());
        assert_eq!((&tokens[..FIRST_ROW], &found[..FIRST_ROW]), (&[77, 77][..], &[77, 77][..]));
        for (i, invalid) in statuses.iter().enumerate() {
            let (drawn, of_row) = (i as u32 % 7, FIRST_ROW + i);
            // Token i of a draw after a failed exchange is the rank.
            let rank = if matches!(drawn, status::LATE_RANK | status::OTHER_CALL) { (i as u32) << 8 } else { 0 };
            let status = if *invalid == 0 { drawn | rank } else { status::PARAMETERS | invalid << 8 };
            let (token, score) = if status == 0 { (i as i64, 0.5 * i as f32) } else { (-1, f32::NEG_INFINITY) };
            assert_eq!((tokens[of_row], scores[of_row], found[of_row]), (token, score, status), "row {of_row}");
        }
        statuses.iter().filter(|invalid| **invalid > 0).count()
    }

    fn check_row(&self, row: usize, output: &mut Output) -> u32 {
        let entry = &self.entries[self.index[row]];
        let [seed_low, seed_high, low, high, has_mask, mask_words, biases, inv, largest_bias, draw, greedy, invalid]: [u32; 12] =
            output.take();
        let filters: RowFilters = bytemuck::cast(output.take::<[u64; 3]>());
        let count = (biases & !PENALISED) as usize;
        let list: Vec<(u32, f32)> = (0..count).map(|_| (output.take(), output.take())).collect();
        let is_penalised = biases & PENALISED != 0;
        let penalties = output.list::<[f32; 2]>(if is_penalised { count + 1 } else { 0 });
        let penalties: Vec<_> =
            penalties.into_iter().map(|[repetition, subtract]| Penalty { repetition, subtract }).collect();
        let contents: u32 = output.take();

        let (mask, mut history) = (mask_of(row), History::new(&entry.prompt));
        history.extend(entry.output.iter().copied());
        let params = RowParams {
            position: self.position(row),
            mask: Some(&mask),
            logit_bias: &entry.bias,
            banned: &entry.banned,
            stop_token_ids: &entry.stops,
            history: Some(&history),
            ..entry.params
        };
        let mut adjustments = Adjustments::default();
        adjustments.collect_within([&params], self.tokens.clone());
        let mut encoder = RowEncoder::new(self.tokens.clone(), self.vocab_size);
        let encoded = encoder.encode(&[params]);
        let want = adjustments.row(0);
        if encoded.is_err() || want.len() > self.capacity {
            let is_valid = encoded.is_ok();
            let named = invalid_parameter(status::PARAMETERS | invalid << 8);
            assert!(invalid > 0 && named.is_none() == is_valid, "{params:?}: {encoded:?}, {named:?}");
            encoded.map_or_else(|error| assert!(error.to_string().contains(named.unwrap().name()), "{error}"), drop);
            assert_eq!((greedy, biases, has_mask, filters, contents), (1, 0, 0, RowFilters::OFF, 0));
            return invalid;
        }
        assert_eq!(invalid, 0, "{params:?}");
        let host = encoder.rows()[0];
        let word = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        assert_eq!((word(seed_low, seed_high), word(low, high)), (params.seed, params.position));
        assert_eq!((has_mask, mask_words, draw), (1, MASK_WORDS as u32, 0));
        assert_eq!((inv, greedy), (host.inv_temperature.to_bits(), host.greedy));
        assert_eq!(filters, encoder.filters()[0], "{params:?}");
        assert_eq!(
            list.iter().map(|item| item.0).collect::<Vec<_>>(),
            want.iter().map(|a| a.token).collect::<Vec<_>>()
        );
        let (mut least, mut largest) = (Penalty { repetition: 1.0, subtract: 0.0 }, 0f32);
        for (i, (want, &(token, bias))) in want.iter().zip(&list).enumerate() {
            let penalty = penalties.get(1 + i).copied().unwrap_or(Penalty { repetition: 1.0, subtract: 0.0 });
            let found = Adjustment { token, bias, repetition: penalty.repetition, subtract: penalty.subtract };
            for logit in [-3.5f32, -1e-3, 0.0, 1e-3, 7.25, f32::NEG_INFINITY] {
                let bits = |a: &Adjustment| (a.apply(logit) + 0.0).to_bits();
                assert_eq!(bits(&found), bits(want), "{found:?}, {want:?}");
            }
            least.repetition = least.repetition.min(penalty.repetition);
            least.subtract = least.subtract.min(penalty.subtract);
            largest = largest.max(bias);
        }
        let filters = (params.temperature > 0.0).then_some((params.min_p, params.top_p, filters.top_k));
        assert_eq!(contents, contents_of(&list, &penalties, &mask, self.vocab_size, filters), "{params:?}");
        assert_eq!(f32::from_bits(largest_bias), largest);
        assert!(penalties.first().is_none_or(|first| *first == least), "{penalties:?}");
        0
    }
}

/// The digest of row_contents.cuh.
fn contents_of(
    list: &[(u32, f32)],
    penalties: &[Penalty],
    mask: &[u32],
    vocab_size: u32,
    filters: Option<(f32, f32, u32)>,
) -> u32 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let share = |key: u64, value: u64| {
        let hash = (key ^ 0xcbf2_9ce4_8422_2325).wrapping_mul(FACTOR);
        (((hash ^ hash >> 29) ^ value).wrapping_mul(FACTOR) >> 32) as u32
    };
    let words = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
    let none = Penalty { repetition: 1.0, subtract: 0.0 };
    let of_token = |(i, &(token, bias)): (usize, &(u32, f32))| {
        let Penalty { repetition, subtract } = penalties.get(1 + i).copied().unwrap_or(none);
        share(words(token, bias.to_bits()), words(repetition.to_bits(), subtract.to_bits()))
    };
    let of_word = |(at, &word): (u32, &u32)| {
        let tokens = vocab_size - 32 * at;
        share(1 << 63 | u64::from(at), u64::from(if tokens < 32 { word & ((1 << tokens) - 1) } else { word }))
    };
    let of_filters = |(min_p, top_p, top_k): (f32, f32, u32)| {
        share(3 << 62 | u64::from(min_p.to_bits()), words(top_p.to_bits(), top_k))
    };
    let tokens = list.iter().enumerate().map(of_token);
    let mask = (0..vocab_size.div_ceil(32)).zip(mask).map(of_word);
    tokens.chain(mask).chain(filters.map(of_filters)).fold(0, u32::wrapping_add)
}

/// Random entries, some of them invalid in one parameter.
fn entries(noise: &Noise, vocab_size: u32) -> Vec<Entry> {
    (0..24u32)
        .map(|e| {
            let word = |i: u32| noise.word(Domain::Generator, e, i);
            let unit = |i: u32| word(i) as f32 / 4294967296.0;
            let is = |i: u32| word(i) % 2 == 1;
            let tokens = |i: u32, count: u32| (0..word(i) % count).map(|t| word(100 * i + t) % vocab_size).collect();
            let mut bias: Vec<(u32, f32)> =
                (0..word(1) % 9).map(|t| (word(2000 + t) % vocab_size, unit(3000 + t) - 0.5)).collect();
            bias.sort_by_key(|bias| bias.0);
            bias.dedup_by_key(|bias| bias.0);
            let value = |i: u32, off: f32, on: f32| if is(i) { off } else { on };
            let params = RowParams {
                seed: u64::from(word(4)) << 20,
                position: u64::from(e) << 40,
                temperature: if e % 5 == 0 { 0.0 } else { 0.1 + unit(5) },
                top_k: if is(6) { 0 } else { word(6) % 1024 },
                top_p: value(7, 1.0, 0.5 + unit(7) / 4.0),
                min_p: value(8, 0.0, unit(8)),
                repetition_penalty: value(9, 1.0, 0.5 + unit(9)),
                frequency_penalty: value(10, 0.0, unit(10) - 0.5),
                presence_penalty: value(11, 0.0, unit(11) - 0.5),
                min_tokens: word(12) % 20,
                ..RowParams::default()
            };
            let mut entry = Entry {
                params,
                bias,
                banned: tokens(13, 6),
                stops: tokens(14, 4),
                prompt: tokens(15, 60),
                output: (0..word(16) % 30).map(|t| word(4000 + t / 3) % vocab_size).collect(),
            };
            let params = &mut entry.params;
            match e {
                8 => params.temperature = f32::NAN,
                9 => params.temperature = 1e-45,
                10 => params.top_p = 0.0,
                11 => params.min_p = 1.5,
                12 => params.repetition_penalty = f32::INFINITY,
                13 => params.frequency_penalty = f32::NEG_INFINITY,
                14 => params.presence_penalty = f32::NAN,
                15 => entry.bias = vec![(3, f32::INFINITY)],
                16 => params.position = 1 << 56,
                17 => params.top_k = vocab_size,
                // A greedy row has no top-k, so none is too large.
                18 | 20 => params.top_k = TOP_K_MAX + 1,
                _ => {}
            }
            entry
        })
        .collect()
}

#[test]
fn rows_of_arrays_are_those_of_the_host() {
    let Some(program) = emulated::program("row_columns") else { return };
    let noise = Noise::new(31, 7).unwrap();
    let index: Vec<usize> = (0..26).map(|row| row * 7 % 24).collect();
    let mut invalid = 0;
    // The vocabulary of 400,000 tokens has two windows.
    for (tokens, vocab_size, capacity) in
        [(0..1200, 1200, 128), (300..777, 1200, 128), (0..5000, 5000, 20), (0..400_000, 400_000, 128), (0..40, 41, 0)]
    {
        let mut entries = entries(&noise, vocab_size);
        // Without an array of biases, subtractions alone are biases.
        for has_biases in [true, false] {
            if !has_biases {
                entries.iter_mut().for_each(|entry| entry.bias.clear());
            }
            let (entries, index, tokens) = (&entries, &index, tokens.clone());
            invalid += EncodedCall { entries, index, tokens, vocab_size, capacity }.check(&program);
        }
    }
    assert!(invalid > 120, "{invalid}");
    assert_eq!(invalid_parameter(status::PARAMETERS | 3 << 8), Some(Knob::TopK));
}
