//! Parts of messages: names from files, counts, rounded numbers.

use std::fmt::Display;

/// Maximum of characters of a name in a message.
const NAME: usize = 80;
/// Maximum of characters of a message.
const MESSAGE: usize = 2000;

/// A name from a file; a long name loses its middle.
pub(crate) fn name(name: &str) -> String {
    cut(name, NAME)
}

/// A message on one line of bounded length. Control characters and bidirectional marks are escaped, since messages
/// contain names from files.
pub(crate) fn message(text: &str) -> String {
    let is_safe = |c: char| {
        !c.is_control() && !matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut line = String::new();
    for c in cut(text, MESSAGE).chars() {
        if is_safe(c) { line.push(c) } else { line.extend(c.escape_default()) }
    }
    line
}

/// A number and its noun, such as "1 row" or "2 rows".
pub(crate) fn count<N: Display + PartialEq + From<u8>>(number: N, noun: &str) -> String {
    let plural = if number == N::from(1) { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// One line that names the flag (or field) with a token outside the vocabulary.
pub(crate) fn unknown_token(name: &str, token: u32, vocab_size: u32) -> String {
    format!("{name} names token {token}, but the vocabulary has size {vocab_size}")
}

/// A log-probability rounded to four decimals, without the sign of -0.
pub(crate) fn rounded(logprob: f64) -> f64 {
    (logprob * 1e4).round() / 1e4 + 0.0
}

fn cut(text: &str, most: usize) -> String {
    let length = text.chars().count();
    if length <= most {
        return text.into();
    }
    let (begin, end) = (most / 2, most / 2 - 3);
    text.chars().take(begin).chain("...".chars()).chain(text.chars().skip(length - end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_lacks_its_middle() {
        assert_eq!(name(&"é".repeat(80)), "é".repeat(80));
        let long = format!("a{}b", "é".repeat(80));
        assert_eq!(name(&long), format!("a{}...{}b", "é".repeat(39), "é".repeat(36)));
    }

    #[test]
    fn one_is_singular() {
        assert_eq!([0u32, 1, 2].map(|n| count(n, "row")), ["0 rows", "1 row", "2 rows"]);
    }

    #[test]
    fn a_message_moves_no_cursor() {
        assert_eq!(message("a\u{1b}[31mb\u{9b}c\u{202e}d\né\u{7f}"), "a\\u{1b}[31mb\\u{9b}c\\u{202e}d\\né\\u{7f}");
        assert_eq!(message(&"x".repeat(9000)).len(), 2000);
    }
}
