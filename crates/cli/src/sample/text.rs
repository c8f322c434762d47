//! Rows as text.

use super::row::{Drawn, RowOutcome};
use crate::output::line::{self, rounded};
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
        let ranking = ranking(drawn);
        writeln!(
            out,
            "row {row}: log Z {:.4}, {n} draws of {}",
            drawn.log_z,
            line::count(ranking.len(), "different token")
        )?;
        summarise(out, drawn, &ranking)?;
    }
    if let Some(kept) = &drawn.kept {
        writeln!(out, "  kept   {}  log mass {:.4}", line::count(kept.count, "token"), kept.log_mass)?;
    }
    for c in &drawn.top {
        let logprob = drawn.log_prob(c.logit);
        writeln!(
            out,
            "  top    token {:>7}  logprob {:>9.4}  probability {:.6}",
            c.winner.token,
            rounded(logprob),
            logprob.exp()
        )?;
    }
    Ok(())
}

fn list(out: &mut dyn Write, drawn: &Drawn) -> io::Result<()> {
    for ((token, score), &logit) in drawn.tokens.iter().zip(&drawn.scores).zip(&drawn.logits).take(LISTED) {
        writeln!(out, "  drawn  token {token:>7}  logprob {:>9.4}  score {score:.4}", rounded(drawn.log_prob(logit)))?;
    }
    Ok(())
}

/// A token, its count and its logit.
type Ranked = (u32, (usize, f32));

/// The drawn tokens, most frequent first, then the lower token.
fn ranking(drawn: &Drawn) -> Vec<Ranked> {
    let mut counts: HashMap<u32, (usize, f32)> = HashMap::new();
    for (&token, &logit) in drawn.tokens.iter().zip(&drawn.logits) {
        counts.entry(token).or_insert((0, logit)).0 += 1;
    }
    let mut ranking: Vec<Ranked> = counts.into_iter().collect();
    ranking.sort_unstable_by_key(|&(token, (count, _))| (std::cmp::Reverse(count), token));
    ranking
}

fn summarise(out: &mut dyn Write, drawn: &Drawn, ranking: &[Ranked]) -> io::Result<()> {
    let n = drawn.tokens.len();
    let (mut others, mut rest) = (n, 1.0);
    for &(token, (count, logit)) in ranking.iter().take(MOST) {
        let (frequency, probability) = (count as f64 / n as f64, drawn.log_prob(logit).exp());
        let times = if count == 1 { "time " } else { "times" };
        writeln!(
            out,
            "  drawn  token {token:>7} {count:>9} {times}  frequency {frequency:.6}  probability {probability:.6}"
        )?;
        others -= count;
        rest -= probability;
    }
    if others > 0 {
        let frequency = others as f64 / n as f64;
        let times = if others == 1 { "time " } else { "times" };
        writeln!(
            out,
            "  drawn  all the others{others:>8} {times}  frequency {frequency:.6}  probability {:.6}",
            rest.max(0.0)
        )?;
    }
    Ok(())
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

    #[test]
    fn many_draws_are_counted() {
        let mut drawn = Drawn { log_z: 2f64.ln(), ..Drawn::default() };
        for i in 0..100u32 {
            drawn.extend(&[Draw { token: i % 2 * 7, score: 0.0, logit: 0.0 }], &[]);
        }
        drawn.extend(&[Draw { token: 7, score: 0.0, logit: 0.0 }], &[]);
        let text = text(&Ok(drawn), false);
        assert!(text.contains("101 draws of 2 different tokens"), "{text}");
        let first = text.lines().nth(1).unwrap();
        assert!(first.contains("7        51 times  frequency 0.504950  probability 0.500000"), "{first}");
    }

    #[test]
    fn one_is_singular() {
        let mut drawn = Drawn::default();
        (0..40).for_each(|_| drawn.extend(&[Draw { token: 7, score: 0.0, logit: 0.0 }], &[]));
        assert!(text(&Ok(drawn.clone()), false).contains("40 draws of 1 different token\n"));
        drawn.extend(&[Draw { token: 8, score: 0.0, logit: 0.0 }], &[]);
        assert!(text(&Ok(drawn), false).contains("8         1 time   frequency"));
    }

    #[test]
    fn a_list_without_replacement_keeps_its_order_and_counts_the_rest() {
        for (n, lines) in [(32, 33), (33, 34), (300, 34)] {
            let mut drawn = Drawn::default();
            (0..n).for_each(|i| drawn.extend(&[Draw { token: 999 - i, score: -(i as f32), logit: 0.0 }], &[]));
            let text = text(&Ok(drawn), true);
            assert_eq!(text.lines().count(), lines, "{text}");
            for (i, line) in (0..32).zip(text.lines().skip(1)) {
                assert!(line.starts_with(&format!("  drawn  token {:>7}  logprob", 999 - i)), "{line}");
            }
            assert_eq!(text.contains(&format!("{} more token", n.saturating_sub(32))), n > 32, "{text}");
            assert_eq!(text.contains("more tokens"), n > 33, "{text}");
        }
    }

    #[test]
    fn a_log_probability_that_rounds_to_zero_has_no_sign() {
        let mut drawn = Drawn { log_z: 1e-9, ..Drawn::default() };
        drawn.extend(&[Draw { token: 7, score: 0.0, logit: 0.0 }], &[]);
        assert!(format!("{:.4}", drawn.log_prob(0.0)).contains("-0.0000"));
        let text = text(&Ok(drawn), false);
        assert!(text.contains("logprob    0.0000"), "{text}");
        assert_eq!(format!("{:.4} {:.4}", rounded(-0.25), rounded(f64::NEG_INFINITY)), "-0.2500 -inf");
    }

    #[test]
    fn what_the_filters_kept_is_counted() {
        let kept = |tokens: Vec<u32>| Some(KeptTokens { count: tokens.len() as u32, log_mass: 2.5, tokens });
        let of = |tokens| text(&Ok(Drawn { kept: kept(tokens), ..Drawn::default() }), false);
        assert!(of(vec![3, 9]).contains("\n  kept   2 tokens  log mass 2.5000\n"), "{}", of(vec![3, 9]));
        assert!(of(vec![3]).contains("  kept   1 token  log mass"));
    }

    #[test]
    fn a_failed_row_is_one_line() {
        let says = "row 3: error: no token can be drawn: each is masked, banned or has logit -inf\n";
        assert_eq!(text(&Err(RowError::NoFiniteLogit.to_string()), false), says);
    }
}
