//! Writes sequences as text or as JSON.

use super::report::Report;
use super::requests::Requests;
use super::sequence::{End, Sequence};
use super::tokenizer::TextTokenizer;
use crate::args::{Format, GenerateArgs};
use crate::error::CommandError;
use crate::output::line::rounded;
use serde_json::json;
use std::io::{self, Write};

/// Writes sequences in order. The first unfinished sequence is written as it grows; later sequences wait.
pub(super) struct Writer<'o> {
    args: &'o GenerateArgs,
    tokenizer: &'o TextTokenizer,
    requests: &'o Requests,
    out: &'o mut dyn Write,
    /// The current sequence.
    at: usize,
    /// Written bytes of its text; `None` before its beginning.
    written: Option<usize>,
}

impl<'o> Writer<'o> {
    pub(super) fn new(
        args: &'o GenerateArgs,
        tokenizer: &'o TextTokenizer,
        requests: &'o Requests,
        out: &'o mut dyn Write,
    ) -> Self {
        Writer { args, tokenizer, requests, out, at: 0, written: None }
    }

    pub(super) fn write_new(&mut self, sequences: &[Sequence<'_>]) -> Result<(), CommandError> {
        self.write(sequences).map_err(CommandError::write("to standard output"))
    }

    /// Ends the line of an interrupted text, so that the error has its own line.
    pub(super) fn end_line(&mut self) {
        if self.written.is_some() {
            // The error is more useful than a failure of this write.
            let _ = writeln!(self.out).and_then(|()| self.out.flush());
        }
    }

    /// Writes the report. The result is whether a sequence failed.
    pub(super) fn finish(self, sequences: &[Sequence<'_>], report: Option<&Report>) -> Result<bool, CommandError> {
        let written = match (report, self.args.format) {
            (None, _) => Ok(()),
            (Some(report), Format::Text) => report.text(self.out),
            (Some(report), Format::Json) => writeln!(self.out, "{}", report.json()),
        };
        written.map_err(CommandError::write("to standard output"))?;
        Ok(sequences.iter().any(|sequence| matches!(sequence.end, Some(End::Failed(_)))))
    }

    fn write(&mut self, sequences: &[Sequence<'_>]) -> io::Result<()> {
        while let Some(sequence) = sequences.get(self.at) {
            if self.args.format == Format::Text {
                self.write_text(sequence, sequences.len() > 1)?;
            }
            if sequence.end.is_none() {
                break;
            }
            match self.args.format {
                Format::Text => self.end_text(sequence)?,
                Format::Json => writeln!(self.out, "{}", self.json(sequence))?,
            }
            (self.at, self.written) = (self.at + 1, None);
        }
        self.out.flush()
    }

    fn write_text(&mut self, sequence: &Sequence<'_>, several: bool) -> io::Result<()> {
        let prompt = &self.args.text.prompt;
        if self.written.is_none() {
            if several {
                let line = if self.at == 0 { "" } else { "\n" };
                writeln!(self.out, "{line}seed {}:", sequence.seed)?;
            }
            write!(self.out, "{prompt}")?;
        }
        let (text, written) = (sequence.stream.text(), self.written.unwrap_or(0));
        // Without a prompt, the text may begin with a space.
        let new = if written == 0 && prompt.is_empty() { text.trim_start() } else { &text[written..] };
        self.written = Some(text.len());
        write!(self.out, "{new}")
    }

    fn end_text(&mut self, sequence: &Sequence<'_>) -> io::Result<()> {
        writeln!(self.out)?;
        if let Some(End::Failed(error)) = &sequence.end {
            writeln!(self.out, "error: {error}")?;
        }
        if let Some(first) = sequence.logprobs.first() {
            let top = if first.top.is_empty() { "" } else { ", then logprob and token of the most probable" };
            writeln!(self.out, "    logprob drawn token{top}")?;
        }
        let (tokens, prompt) = (sequence.history.tokens(), sequence.history.prompt().len());
        for (place, logprobs) in (prompt..tokens.len()).zip(&sequence.logprobs) {
            let piece = |token| self.tokenizer.piece(&tokens[..place], token).map_err(io::Error::other);
            write!(self.out, "  {:>9.4} {:?}", rounded(logprobs.drawn), piece(tokens[place])?)?;
            for (token, logprob) in &logprobs.top {
                write!(self.out, "  {:.4} {:?}", rounded(*logprob), piece(*token)?)?;
            }
            writeln!(self.out)?;
        }
        Ok(())
    }

    fn json(&self, sequence: &Sequence<'_>) -> serde_json::Value {
        let (finish, error) = match &sequence.end {
            Some(End::Stop) => ("stop", None),
            Some(End::Failed(error)) => ("error", Some(error.to_string())),
            _ => ("length", None),
        };
        let mut json = json!({
            "seed": sequence.seed,
            "prompt_tokens": sequence.history.prompt(),
            "tokens": sequence.history.output(),
            "text": sequence.stream.text(),
            "finish_reason": finish,
        });
        if let Some(error) = error {
            json["error"] = error.into();
        }
        if self.requests.has_logprobs(self.at) {
            let top = |top: &[(u32, f64)]| -> Vec<_> {
                top.iter().map(|(token, logprob)| json!({ "token": token, "logprob": logprob })).collect()
            };
            let all = &sequence.logprobs;
            json["logprobs"] = all.iter().map(|l| l.drawn).collect();
            json["top_logprobs"] = all.iter().map(|l| top(&l.top)).collect::<Vec<_>>().into();
        }
        json
    }
}
