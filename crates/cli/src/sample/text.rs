//! Rows as text.

use super::row::{Drawn, RowOutcome};
use crate::output::line::{self, rounded};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, Write};

/// Listed draws of a row; more are summarised.
const LISTED: usize = 32;
/// Listed tokens of a summary.
const MOST: usize = 10;

/// Writes one row. Up to 32 draws are listed. Of more draws without replacement (`ordered`), the first 32 are listed and
/// the rest is counted. Of more independent draws, the most frequent tokens are listed with frequency and probability.
pub(super) fn write_text(out: &mut dyn Write, row: usize, outcome: &RowOutcome, ordered: bool) -> io::Result<()> {
    let drawn = match outcome {
        Ok(drawn) => drawn,
        Err(error) => return writeln!(out, "row {row}: error: {error}"),
    };
    let n = drawn.tokens.len();
    if n <= LISTED {
        writeln!(out, "row {row}: log Z {:.4}", drawn.log_z)?;
        list(out, drawn)?;
    } else if ordered {
        writeln!(out, "row {row}: log Z {:.4}, {n} draws without replacement, best first", drawn.log_z)?;
        list(out, drawn)?;
        writeln!(out, "  drawn  {}: --format json lists all", line::count(n - LISTED, "more token"))?;
    } else {
        summarise(out, row, drawn)?;
    }
    if let Some(kept) = &drawn.kept {
        writeln!(out, "  kept   {}  log mass {:.4}", line::count(kept.count, "token"), kept.log_mass)?;
    }
    let mut line = |name: &str, token: u32, logit: f32| {
        let logprob = drawn.log_prob(logit);
        let (rounded, probability) = (rounded(logprob), logprob.exp());
        writeln!(out, "  {name:<5}  token {token:>7}  logprob {rounded:>9.4}  probability {probability:.6}")
    };
    drawn.top.iter().try_for_each(|&(token, logit)| line("top", token, logit))?;
    drawn.given.iter().try_for_each(|&(token, logit)| line("given", token, logit))
}

fn list(out: &mut dyn Write, drawn: &Drawn) -> io::Result<()> {
    let draws = drawn.tokens.iter().zip(&drawn.scores).zip(&drawn.logits);
    for (i, ((token, score), &logit)) in draws.take(LISTED).enumerate() {
        let rank = drawn.ranks.get(i).map_or(String::new(), |rank| format!("  rank {rank}"));
        let logprob = rounded(drawn.log_prob(logit));
        writeln!(out, "  drawn  token {token:>7}  logprob {logprob:>9.4}  score {score:.4}{rank}")?;
    }
    Ok(())
}

/// Writes the most frequent tokens, then the lower token.
fn summarise(out: &mut dyn Write, row: usize, drawn: &Drawn) -> io::Result<()> {
    let n = drawn.tokens.len();
    let mut counts: HashMap<u32, (usize, f32)> = HashMap::new();
    for (&token, &logit) in drawn.tokens.iter().zip(&drawn.logits) {
        counts.entry(token).or_insert((0, logit)).0 += 1;
    }
    let mut ranking: Vec<_> = counts.into_iter().collect();
    ranking.sort_unstable_by_key(|&(token, (count, _))| (Reverse(count), token));
    let different = line::count(ranking.len(), "different token");
    writeln!(out, "row {row}: log Z {:.4}, {n} draws of {different}", drawn.log_z)?;
    let mut line = |name: &str, count: usize, probability: f64| {
        let frequency = count as f64 / n as f64;
        writeln!(out, "  drawn  {name} {count:>9} x  frequency {frequency:.6}  probability {probability:.6}")
    };
    let (mut others, mut rest) = (n, 1.0);
    for &(token, (count, logit)) in ranking.iter().take(MOST) {
        let probability = drawn.log_prob(logit).exp();
        line(&format!("token {token:>7}"), count, probability)?;
        (others, rest) = (others - count, rest - probability);
    }
    if others > 0 { line("all others   ", others, rest.max(0.0)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::super::row::KeptTokens;
    use super::*;
    use flash_sampling::{Draw, RowError};

    fn text(outcome: &RowOutcome, ordered: bool) -> String {
        let mut out = Vec::new();
        write_text(&mut out, 3, outcome, ordered).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// Draws of these tokens, each with logit 0.
    fn drawn(tokens: impl Iterator<Item = u32>, log_z: f64) -> Drawn {
        let draws: Vec<_> = tokens.map(|token| Draw::new(token, 0.0, 0.0)).collect();
        let mut drawn = Drawn { log_z, ..Drawn::default() };
        drawn.extend(&draws, &[]);
        drawn
    }

    #[test]
    fn many_draws_are_counted() {
        let text = text(&Ok(drawn((0..101).map(|i| if i % 2 == 0 { 7 } else { 0 }), 2f64.ln())), false);
        assert!(text.contains("101 draws of 2 different tokens"), "{text}");
        let first = text.lines().nth(1).unwrap();
        assert!(first.contains("7        51 x  frequency 0.504950  probability 0.500000"), "{first}");
    }

    #[test]
    fn a_list_without_replacement_keeps_its_order_and_counts_the_rest() {
        for (n, lines) in [(32, 33), (33, 34), (300, 34)] {
            let text = text(&Ok(drawn((0..n).map(|i| 999 - i), 0.0)), true);
            assert_eq!(text.lines().count(), lines, "{text}");
            for (i, line) in (0..32).zip(text.lines().skip(1)) {
                assert!(line.starts_with(&format!("  drawn  token {:>7}  logprob", 999 - i)), "{line}");
            }
            assert_eq!(text.contains(&format!("{} more token", n.saturating_sub(32))), n > 32, "{text}");
        }
    }

    #[test]
    fn a_log_probability_that_rounds_to_zero_has_no_sign() {
        let drawn = drawn([7].into_iter(), 1e-9);
        assert!(format!("{:.4}", drawn.log_prob(0.0)).contains("-0.0000"));
        assert!(text(&Ok(drawn), false).contains("logprob    0.0000"));
        assert_eq!(format!("{:.4} {:.4}", rounded(-0.25), rounded(f64::NEG_INFINITY)), "-0.2500 -inf");
    }

    #[test]
    fn kept_tokens_are_counted_and_a_failed_row_is_one_line() {
        let kept = Some(KeptTokens { count: 2, log_mass: 2.5, tokens: vec![3, 9] });
        let kept = text(&Ok(Drawn { kept, ..Drawn::default() }), false);
        assert!(kept.contains("\n  kept   2 tokens  log mass 2.5000\n"), "{kept}");
        let says = "row 3: error: no token can be drawn: each is masked, banned or has logit -inf\n";
        assert_eq!(text(&Err(RowError::NoFiniteLogit.to_string()), false), says);
    }
}
