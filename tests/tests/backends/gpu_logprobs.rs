//! Log-probabilities in both laws, and kept tokens, of calls that do not wait.

use flash_sampling_core::{RowSample, Samples};
use flash_sampling_cuda::DeviceAddress;
use flash_sampling_cuda::abi::{KeptColumns, LogprobColumns, TokenColumns};
use flash_sampling_cuda::cudarc::driver::{CudaSlice, CudaStream};
use std::sync::Arc;

/// Tokens with requested log-probabilities, in the first and the last shard of a vocabulary of 3004 tokens.
pub(crate) const GIVEN: [u32; 3] = [0, 77, 2900];

/// The results of a call in one law.
struct Law {
    top_n: usize,
    log_z: CudaSlice<f64>,
    log_probs: CudaSlice<f32>,
    ranks: CudaSlice<i32>,
    top_tokens: CudaSlice<i32>,
    top_log_probs: CudaSlice<f32>,
    token_ids: CudaSlice<i64>,
    token_log_probs: CudaSlice<f32>,
}

/// The bits of all floats of a law, and all its integers.
pub(crate) type LawBits = (Vec<u64>, Vec<i32>);

/// The GPU's logarithm may differ in its last bit, and so may a log-probability.
fn assert_near(found: f64, want: f64, what: &str) {
    let is_near = (found - want).abs() <= 1e-14 * (1.0 + want.abs()) + f64::from(f32::EPSILON) / 2.0 * want.abs();
    assert!(found == want || is_near, "{what}: {found:e} against {want:e}");
}

impl Law {
    fn new(rows: usize, top_n: usize, stream: &Arc<CudaStream>) -> Law {
        Law {
            top_n,
            log_z: stream.clone_htod(&vec![f64::NAN; rows]).unwrap(),
            log_probs: stream.clone_htod(&vec![f32::NAN; rows]).unwrap(),
            ranks: stream.clone_htod(&vec![-7; rows]).unwrap(),
            top_tokens: stream.clone_htod(&vec![-7; rows * top_n]).unwrap(),
            top_log_probs: stream.clone_htod(&vec![f32::NAN; rows * top_n]).unwrap(),
            token_ids: stream.clone_htod(&GIVEN.map(i64::from).repeat(rows)).unwrap(),
            token_log_probs: stream.clone_htod(&vec![f32::NAN; rows * GIVEN.len()]).unwrap(),
        }
    }

    /// Waits for the stream, and returns the results.
    fn bits(&self, stream: &Arc<CudaStream>) -> LawBits {
        let log_z = stream.clone_dtoh(&self.log_z).unwrap();
        let floats = [&self.log_probs, &self.top_log_probs, &self.token_log_probs];
        let floats = floats.map(|floats| stream.clone_dtoh(floats).unwrap()).concat();
        let ints = [&self.ranks, &self.top_tokens].map(|ints| stream.clone_dtoh(ints).unwrap()).concat();
        stream.synchronize().unwrap();
        let floats = floats.into_iter().map(|x| u64::from(x.to_bits()));
        (log_z.into_iter().map(f64::to_bits).chain(floats).collect(), ints)
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
            top_n: self.top_n as u32,
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
            want_top.resize(self.top_n, (-1, f64::NEG_INFINITY));
            for (i, (token, nats)) in want_top.into_iter().enumerate() {
                assert_eq!(top_tokens[r * self.top_n + i], token, "{what}: token {i} of the most probable");
                assert_near(
                    f64::from(top_log_probs[r * self.top_n + i]),
                    nats,
                    &format!("{what}: log-probability {i}"),
                );
            }
        }
    }
}

/// The results of a call: both laws, and the kept tokens.
pub(crate) struct Results {
    tokens: CudaSlice<i64>,
    laws: [Law; 2],
    begin: CudaSlice<i64>,
    pub(crate) kept: CudaSlice<i32>,
}

impl Results {
    /// Room for the `top_n` most probable tokens of a row, and for `capacity` kept tokens of all rows.
    pub(crate) fn new(rows: usize, top_n: usize, capacity: usize, stream: &Arc<CudaStream>) -> Results {
        Results {
            tokens: stream.clone_htod(&vec![-7i64; rows]).unwrap(),
            laws: [(); 2].map(|()| Law::new(rows, top_n, stream)),
            begin: stream.clone_htod(&vec![-7i64; rows + 1]).unwrap(),
            kept: stream.clone_htod(&vec![-7; capacity]).unwrap(),
        }
    }

    pub(crate) fn columns(&self, stream: &CudaStream) -> TokenColumns {
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

    /// Waits for the stream, and returns the bits of both laws, the kept tokens, and where each row's begin.
    pub(crate) fn bits(&self, stream: &Arc<CudaStream>) -> ([LawBits; 2], Vec<i32>, Vec<i64>) {
        let (kept, begin) = (stream.clone_dtoh(&self.kept).unwrap(), stream.clone_dtoh(&self.begin).unwrap());
        (self.laws.each_ref().map(|law| law.bits(stream)), kept, begin)
    }

    /// Compares the results with those of calls that wait, in both laws. Returns the number of kept tokens.
    pub(crate) fn check(&self, want: &[Samples; 2], stream: &Arc<CudaStream>, what: &str) -> usize {
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
