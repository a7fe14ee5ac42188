{{/* The labels of one part, by which it is selected, too. Takes (list $ "daemon"). */}}
{{- define "lockstep.labels" -}}
{{- $root := index . 0 -}}
{app.kubernetes.io/name: lockstep, app.kubernetes.io/instance: {{ $root.Release.Name }}, app.kubernetes.io/component: {{ index . 1 }}}
{{- end }}

{{/* An image. Takes (list $ .Values.daemon). */}}
{{- define "lockstep.image" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
{{- with $root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ $part.repository }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- with $part.digest }}@{{ . }}{{ end -}}
{{- end }}

{{/* The port of http.listen; a configuration without one that probes reach is refused. */}}
{{- define "lockstep.port" -}}
{{- $config := fromYaml .Values.config -}}
{{- with $config.Error }}{{ fail (printf "config: this is no YAML: %s" .) }}{{ end -}}
{{- $listen := dig "http" "listen" "127.0.0.1:8080" $config -}}
{{- if not (regexMatch "^(0\\.0\\.0\\.0|\\[::\\]):[1-9][0-9]*$" $listen) -}}
{{- fail (printf "config: http.listen is %s, and probes reach 0.0.0.0:PORT only" $listen) -}}
{{- end -}}
{{ regexFind "[0-9]+$" $listen }}
{{- end }}

{{- define "lockstep.configMap" -}}
lockstep.yaml: |
{{ .Values.config | trim | indent 2 }}
{{- end }}

{{/* How every pod runs: as nobody in particular, without a token of the cluster. */}}
{{- define "lockstep.pod" -}}
automountServiceAccountToken: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "lockstep.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary .Release.Name "default" .Values.serviceAccount.create) }}
{{- end }}

{{/* What every container has. Takes (list $ .Values.daemon). */}}
{{- define "lockstep.container" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
envFrom: [{secretRef: {name: {{ $root.Values.existingSecret | default $root.Release.Name }}}}]
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
resources:
  {{- toYaml $part.resources | nindent 2 }}
{{- end }}

{{- define "lockstep.mounts" -}}
- {name: config, mountPath: /etc/lockstep, readOnly: true}
- {name: scratch, mountPath: /tmp}
- {name: home, mountPath: /var/lib/lockstep}
{{- with .Values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Takes (list $ ConfigMap scratch). */}}
{{- define "lockstep.volumes" -}}
{{- $root := index . 0 -}}
- {name: config, configMap: {name: {{ index . 1 }}}}
- {name: scratch, emptyDir: {{ toJson (index . 2) }}}
- {name: home, emptyDir: {}}
{{- with $root.Values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "lockstep.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end }}
