//! Text of a growing sequence: characters that span tokens, and stop texts.

/// The text of a growing list of tokens. It withholds an incomplete character and a possible beginning of a stop text.
#[derive(Debug)]
pub(super) struct TextStream<'s> {
    stops: &'s [String],
    tokens: Vec<u32>,
    /// Decoding begins at this token: the text of a token (its space) depends on tokens before it.
    context: usize,
    /// Number of tokens in `text`.
    read: usize,
    text: String,
    stopped: bool,
}

/// The replacement character of invalid bytes.
const BROKEN: char = '\u{fffd}';

impl<'s> TextStream<'s> {
    /// A stream after a prompt, whose text is not part of the stream.
    pub(super) fn after(prompt: &[u32], stops: &'s [String]) -> Self {
        let read = prompt.len();
        // A character has at most four bytes, so at most four tokens.
        let context = read.saturating_sub(4);
        TextStream { stops, tokens: prompt.to_vec(), context, read, text: String::new(), stopped: false }
    }

    /// Adds a token. The result is whether the text has reached a stop text.
    pub(super) fn push<E>(&mut self, token: u32, decode: impl Fn(&[u32]) -> Result<String, E>) -> Result<bool, E> {
        self.tokens.push(token);
        let new = self.new_text(decode)?;
        if !new.ends_with(BROKEN) {
            self.take(&new);
        }
        Ok(self.stopped)
    }

    /// Ends the stream; withheld text becomes part of the text.
    pub(super) fn end<E>(&mut self, decode: impl Fn(&[u32]) -> Result<String, E>) -> Result<(), E> {
        if self.read < self.tokens.len() && !self.stopped {
            let new = self.new_text(decode)?;
            self.take(&new);
        }
        self.stops = &[];
        Ok(())
    }

    fn new_text<E>(&mut self, decode: impl Fn(&[u32]) -> Result<String, E>) -> Result<String, E> {
        let mut known = decode(&self.tokens[self.context..self.read])?;
        // A context that begins within a character may break what follows it.
        while known.starts_with(BROKEN) && self.context < self.read {
            self.context += 1;
            known = decode(&self.tokens[self.context..self.read])?;
        }
        let all = decode(&self.tokens[self.context..])?;
        // A decoder with byte fallback may change the text of the context; then the new tokens are decoded alone.
        match all.strip_prefix(&known) {
            Some(new) => Ok(new.to_owned()),
            None => decode(&self.tokens[self.read..]),
        }
    }

    fn take(&mut self, new: &str) {
        let before = self.text.len();
        self.text.push_str(new);
        self.context = self.read;
        self.read = self.tokens.len();
        // A stop text may begin in the earlier text.
        let from = char_boundary(&self.text, before.saturating_sub(self.longest()));
        let found = self.stops.iter().filter_map(|stop| self.text[from..].find(stop.as_str())).min();
        if let Some(at) = found {
            self.text.truncate(from + at);
            self.stopped = true;
        }
    }

    fn longest(&self) -> usize {
        self.stops.iter().map(String::len).max().unwrap_or(0)
    }

    /// The text that later tokens cannot change.
    pub(super) fn text(&self) -> &str {
        if self.stopped {
            return &self.text;
        }
        let begins = |end: usize| self.stops.iter().any(|stop| stop.starts_with(&self.text[end..]));
        let from = char_boundary(&self.text, self.text.len().saturating_sub(self.longest()));
        let held = (from..self.text.len()).find(|&end| self.text.is_char_boundary(end) && begins(end));
        &self.text[..held.unwrap_or(self.text.len())]
    }
}

/// The last boundary of characters at or before a byte.
fn char_boundary(text: &str, at: usize) -> usize {
    (0..=at).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    /// Tokens are bytes.
    fn decode(tokens: &[u32]) -> Result<String, Infallible> {
        let bytes: Vec<u8> = tokens.iter().map(|&token| token as u8).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The text after each byte up to the stop, and at the end.
    fn stream(text: &str, stops: &[&str]) -> Vec<String> {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let prompt: Vec<u32> = "so é".bytes().map(u32::from).collect();
        let mut stream = TextStream::after(&prompt, &stops);
        let mut seen = Vec::new();
        for byte in text.bytes() {
            let stopped = stream.push(byte.into(), decode).unwrap();
            seen.push(stream.text().to_owned());
            if stopped {
                break;
            }
        }
        stream.end(decode).unwrap();
        seen.push(stream.text().to_owned());
        seen
    }

    #[test]
    fn characters_come_whole() {
        assert_eq!(stream("aé€.", &[]), ["a", "a", "aé", "aé", "aé", "aé€", "aé€.", "aé€."]);
        let mut cut = TextStream::after(&[], &[]);
        assert!(!cut.push(0xe2, decode).unwrap());
        assert_eq!(cut.text(), "");
        cut.end(decode).unwrap();
        assert_eq!(cut.text(), "\u{fffd}");
    }

    /// Decodes a run of bytes above 127 as a whole, as decoders with byte fallback do.
    fn decode_runs(tokens: &[u32]) -> Result<String, Infallible> {
        let run = |run: &[u32]| {
            let bytes: Vec<u8> = run.iter().map(|&token| token as u8).collect();
            String::from_utf8(bytes).unwrap_or_else(|_| BROKEN.to_string().repeat(run.len()))
        };
        Ok(tokens.chunk_by(|a, b| *a > 127 && *b > 127).map(run).collect())
    }

    #[test]
    fn invalid_bytes_do_not_change_the_text_around_them() {
        let text = |prompt: &[u32], tokens: &[u32]| {
            let mut stream = TextStream::after(prompt, &[]);
            tokens.iter().for_each(|&token| assert!(!stream.push(token, decode_runs).unwrap()));
            stream.end(decode_runs).unwrap();
            stream.text().to_owned()
        };
        let [a, b] = [u32::from('a'), u32::from('b')];
        assert_eq!(text(&[], &[0xc3, 0xa9, 0xe2, a, b]), "é\u{fffd}ab");
        assert_eq!(text(&[], &[0xc3, 0xa9, 0xe2, 0x82, 0xac, a]), "é€a");
        // The last four tokens of the prompt begin within a character.
        assert_eq!(text(&[0xe2, 0x82, 0xac, 0xc3, 0xa9], &[0xc3, 0xa9, b]), "éb");
    }

    #[test]
    fn a_possible_beginning_of_a_stop_is_withheld() {
        assert_eq!(
            stream("a. b.\n\nc", &["\n\n", "b!"]),
            ["a", "a.", "a. ", "a. ", "a. b.", "a. b.", "a. b.", "a. b."]
        );
        assert_eq!(stream("aab", &["ab"]), ["", "a", "a", "a"]);
        assert_eq!(stream("ab", &["abc"]), ["", "", "ab"]);
        assert_eq!(stream("x€y", &["€"]), ["x", "x", "x", "x", "x"]);
    }
}
